#include "generation.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include <fmt/core.h>

#include "qfilters/error.h"

#include "eval/tasks/scoring.h"
#include "interrupt.h"
#include "output.h"

namespace qfilters::cli {

namespace {

// Parts of a saved generation, beside those of its session.
constexpr const char* kSampler = "sampler";
constexpr const char* kSeed = "seed";
constexpr const char* kPending = "pending";
constexpr const char* kEnded = "ended";
constexpr const char* kLogits = "logits";

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
    case Stop::kInputEnded:
      return "input_ended";
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
         session_.tokens().size() + pending_.size() + tokens <=
             session_.model().trained_length();
}

void Generation::note_position() {
  const std::size_t trained = session_.model().trained_length();
  if (warned_ || trained == 0 || session_.tokens().size() <= trained) return;
  warned_ = true;
  warn(fmt::format(
      "positions pass the model's trained length of {}; "
      "--stop-at-trained-length stops there",
      trained));
}

bool Generation::feed(
    std::span<const llama::Token> added, const Progress& progress) {
  std::vector<llama::Token> tokens = std::exchange(pending_, {});
  tokens.insert(tokens.end(), added.begin(), added.end());
  saved_logits_.clear();
  can_answer_ = false;
  ended_ = false;
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
  can_answer_ = done == tokens.size();
  return can_answer_ && InterruptGuard::signal() == 0;
}

std::span<const float> Generation::next_logits() const {
  if (!saved_logits_.empty()) return saved_logits_;
  return {session_.logits(last_), session_.model().vocabulary()};
}

llama::Token Generation::next() {
  if (!pending_.empty()) {
    session_.step(pending_, llama::Logits::kLast);
    pending_.clear();
    saved_logits_.clear();
    last_ = 0;
    ++decoded_;
  }
  return sampler_.pick(next_logits());
}

Answer Generation::answer(const Write& write) {
  Answer answer;
  if (ended_ && !options_.ignore_end) {
    answer.stop = Stop::kEnd;
    return answer;
  }
  if (!has_room(0)) {
    answer.stop = Stop::kTrainedLength;
    return answer;
  }
  std::size_t count = 0;
  while (count < options_.tokens) {
    llama::Token token = 0;
    double& seconds = pending_.empty() ? feed_seconds_ : decode_seconds_;
    eval::timed(seconds, [&] { token = next(); });
    note_position();
    if (!first_token_seconds_) first_token_seconds_ = feed_seconds_;
    if (!options_.ignore_end && session_.model().is_end(token)) {
      answer.stop = Stop::kEnd;
      ended_ = true;
      return answer;
    }
    const std::string piece = session_.model().piece(token);
    answer.text += piece;
    pending_.push_back(token);
    write(piece);
    ++count;
    ++generated_;
    if (InterruptGuard::signal() != 0) {
      answer.stop = Stop::kInterrupted;
      return answer;
    }
    if (!has_room(0)) {
      answer.stop = Stop::kTrainedLength;
      return answer;
    }
  }
  return answer;
}

Snapshot Generation::save() const {
  if (!can_answer_) {
    throw Error(ErrorKind::kInvalidArgument, "save: the prompt is not in yet");
  }
  Snapshot out = session_.save();
  out.put_text(kSampler, sampler_.state());
  out.put_values<std::uint64_t>(kSeed, std::span(&options_.sampling.seed, 1));
  out.put_values<std::uint8_t>(
      kEnded,
      std::vector<std::uint8_t>{ended_ ? std::uint8_t{1} : std::uint8_t{0}});
  out.put_values<llama::Token>(kPending, pending_);
  if (pending_.empty()) out.put_values<float>(kLogits, next_logits());
  return out;
}

void Generation::restore(const Snapshot& saved, bool seed_given) {
  session_.check_model(saved);
  const auto vocabulary = session_.model().vocabulary();
  auto pending = saved.values<llama::Token>(kPending);
  std::vector<float> logits;
  if (pending.empty()) logits = saved.values<float>(kLogits);
  const auto seed = saved.values<std::uint64_t>(kSeed);
  const auto ended = saved.values<std::uint8_t>(kEnded);
  const auto no_logit = [](float logit) {
    return std::isnan(logit) || logit == std::numeric_limits<float>::infinity();
  };
  const bool sound =
      seed.size() == 1 && ended.size() == 1 && ended[0] <= 1 &&
      std::ranges::none_of(logits, no_logit) &&
      (pending.empty()
           ? logits.size() == vocabulary
           : pending.size() == 1 && pending.front() >= 0 &&
                 static_cast<std::size_t>(pending.front()) < vocabulary);
  if (!sound) {
    throw Error(
        ErrorKind::kFile, "restore: the saved generation makes no sense");
  }
  Sampler sampler = sampler_;
  if (!seed_given || seed[0] == options_.sampling.seed) {
    sampler.restore(saved.text(kSampler));
  }
  session_.restore(saved);
  if (!seed_given) options_.sampling.seed = seed[0];
  ended_ = ended[0] != 0;
  sampler_ = std::move(sampler);
  pending_ = std::move(pending);
  saved_logits_ = std::move(logits);
  can_answer_ = true;
}

}  // namespace qfilters::cli
