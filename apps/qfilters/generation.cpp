#include "generation.h"

#include <fmt/core.h>

#include "eval/tasks/scoring.h"
#include "interrupt.h"
#include "output.h"

namespace qfilters::cli {

namespace {

std::vector<llama::Token> banned_tokens(
    const llama::Model& model, const GenerationOptions& options) {
  std::vector<llama::Token> banned;
  if (!options.ignore_end) return banned;
  const auto vocabulary = static_cast<llama::Token>(model.vocabulary());
  for (llama::Token token = 0; token < vocabulary; ++token) {
    if (model.is_end(token)) banned.push_back(token);
  }
  return banned;
}

}  // namespace

const char* to_string(Stop stop) noexcept {
  switch (stop) {
    case Stop::kLength:
      return "length";
    case Stop::kEnd:
      return "end";
    case Stop::kInterrupted:
      return "interrupted";
    case Stop::kTrainedLength:
      return "trained_length";
  }
  return "";
}

Generation::Generation(
    llama::Session& session, const GenerationOptions& options)
    : session_(session),
      options_(options),
      sampler_(options.sampling, banned_tokens(session.model(), options)) {}

bool Generation::has_room(std::size_t tokens) const noexcept {
  return !options_.stop_at_trained_length ||
         fed_ + decoded_ + tokens <= session_.model().trained_length();
}

void Generation::note_position() {
  const std::size_t trained = session_.model().trained_length();
  if (warned_ || trained == 0 || fed_ + decoded_ <= trained) return;
  warned_ = true;
  warn(fmt::format(
      "positions pass the model's trained length of {}; "
      "--stop-at-trained-length stops there",
      trained));
}

bool Generation::feed(
    std::span<const llama::Token> tokens, const Progress& progress) {
  std::size_t done = 0;
  eval::timed(feed_seconds_, [&] {
    done = session_.prefill(tokens, [&](std::size_t so_far) {
      if (progress) progress(so_far, tokens.size());
      return InterruptGuard::signal() == 0;
    });
  });
  fed_ += done;
  note_position();
  if (done > 0) last_ = (done - 1) % session_.chunk();
  return done == tokens.size() && InterruptGuard::signal() == 0;
}

llama::Token Generation::sample() {
  return sampler_.pick({session_.logits(last_), session_.model().vocabulary()});
}

Answer Generation::answer(const Write& write) {
  Answer answer;
  std::size_t count = 0;
  while (count < options_.tokens) {
    llama::Token token = 0;
    double& seconds = answer.pending.empty() ? feed_seconds_ : decode_seconds_;
    eval::timed(seconds, [&] {
      if (!answer.pending.empty()) {
        session_.step(answer.pending, llama::Logits::kLast);
        last_ = 0;
        ++decoded_;
      }
      token = sample();
    });
    answer.pending.clear();
    note_position();
    if (!first_token_seconds_) first_token_seconds_ = feed_seconds_;
    if (!options_.ignore_end && session_.model().is_end(token)) {
      answer.stop = Stop::kEnd;
      return answer;
    }
    const std::string piece = session_.model().piece(token);
    answer.text += piece;
    answer.pending.push_back(token);
    write(piece);
    ++count;
    ++generated_;
    if (InterruptGuard::signal() != 0) {
      answer.stop = Stop::kInterrupted;
      return answer;
    }
    if (!has_room(1)) {
      answer.stop = Stop::kTrainedLength;
      return answer;
    }
  }
  return answer;
}

}  // namespace qfilters::cli
