#include "eval/tasks/reading.h"

#include <algorithm>

#include "qfilters/error.h"

#include "eval/tasks/scoring.h"

namespace qfilters::eval {

void set_usage(RunRecord& record, const Usage& usage) {
  record.stats = usage.stats;
  record.stats.kv_bytes_peak =
      std::max(usage.stats.kv_bytes_peak, usage.kv_bytes_prefill);
  record.stats.eviction_seconds += usage.compression_seconds;
  record.kv_bytes_compressed = usage.kv_bytes_compressed;
  record.prefill_tokens = usage.prefill_tokens;
  record.decode_tokens = usage.decode_tokens;
  record.prefill_seconds = usage.prefill_seconds;
  record.decode_seconds = usage.decode_seconds;
}

Inquiry make_inquiry(
    const Codec& codec, std::string_view question, std::string_view answer) {
  const std::vector<Token> alone = codec.tokenize(question);
  const std::vector<Token> both =
      codec.tokenize(std::string(question) + std::string(answer));
  const auto split =
      std::mismatch(both.begin(), both.end(), alone.begin(), alone.end()).first;
  Inquiry inquiry;
  inquiry.question.assign(both.begin(), split);
  inquiry.answer.assign(split, both.end());
  if (inquiry.question.empty() || inquiry.answer.empty()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "inquiry: the vocabulary has no tokens for the question or the answer");
  }
  return inquiry;
}

std::size_t tokens_of(const Inquiry& inquiry) noexcept {
  return inquiry.question.size() +
         std::max(inquiry.answer.size(), inquiry.generate);
}

std::size_t feed(llama::Session& session, std::span<const Token> tokens) {
  session.prefill(tokens);
  return (tokens.size() - 1) % session.chunk();
}

ContextOpener streaming_opener(
    const SessionFactory& open,
    std::span<const Token> context,
    std::size_t tokens) {
  return [&open, context, tokens](Usage& usage) {
    std::unique_ptr<llama::Session> session = open(tokens);
    if (context.empty()) return session;
    timed(usage.prefill_seconds, [&] {
      feed(*session, context);
      session->settle();
    });
    usage.prefill_tokens += context.size();
    return session;
  };
}

Reading::Reading(ContextOpener open, const Codec& codec, Usage& usage)
    : open_(std::move(open)), codec_(codec), usage_(usage) {}

Reading::~Reading() {
  close();
}

void Reading::close() {
  if (session_ == nullptr) return;
  llama::SessionStats stats = session_->stats();
  stats.kv_bytes_peak = std::max(stats.kv_bytes_peak, kv_bytes_peak_);
  add_stats(usage_.stats, stats, usage_.sessions == 0);
  ++usage_.sessions;
  kv_bytes_peak_ = 0;
  session_.reset();
}

void Reading::read() {
  close();
  session_ = open_(usage_);
  fresh_ = true;
  try {
    saved_ = session_->save();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUnsupported) throw;
  }
}

/// Back to the end of the context.
void Reading::rewind() {
  if (fresh_) return;
  if (saved_) {
    // A restored cache knows no peak but its own.
    kv_bytes_peak_ = std::max(kv_bytes_peak_, session_->stats().kv_bytes_peak);
    session_->restore(*saved_);
  } else {
    read();
  }
  fresh_ = true;
}

std::size_t Reading::feed_timed(std::span<const Token> tokens) {
  std::size_t last = 0;
  timed(usage_.prefill_seconds, [&] { last = feed(*session_, tokens); });
  usage_.prefill_tokens += tokens.size();
  fresh_ = false;
  return last;
}

void Reading::step_timed(Token token) {
  timed(usage_.decode_seconds, [&] {
    session_->step({&token, 1}, llama::Logits::kLast);
  });
  ++usage_.decode_tokens;
}

/// Teacher forced. Whether every token was the greedy choice.
bool Reading::force(const Inquiry& inquiry, Reply& reply) {
  rewind();
  std::size_t last = feed_timed(inquiry.question);
  const llama::SessionStats stats = session_->stats();
  reply.kept = stats.rows_mean / static_cast<double>(stats.tokens);
  bool greedy = true;
  double nll = 0;
  for (std::size_t i = 0; i < inquiry.answer.size(); ++i) {
    const Token token = inquiry.answer[i];
    const std::span<const float> logits(
        session_->logits(last), codec_.vocabulary);
    nll += negative_log_likelihood(logits, token);
    greedy = greedy && greedy_choice(logits) == token;
    if (i + 1 == inquiry.answer.size()) break;
    step_timed(token);
    last = 0;
  }
  reply.nll_per_token = nll / static_cast<double>(inquiry.answer.size());
  return greedy;
}

std::string Reading::generate(const Inquiry& inquiry) {
  rewind();
  std::size_t last = feed_timed(inquiry.question);
  std::string prediction;
  for (std::size_t i = 0; i < inquiry.generate; ++i) {
    const Token token =
        greedy_choice({session_->logits(last), codec_.vocabulary});
    if (codec_.is_end && codec_.is_end(token)) break;
    prediction += codec_.piece(token);
    const bool complete = share_found(prediction, inquiry.references) == 1;
    if (complete || i + 1 == inquiry.generate) break;
    step_timed(token);
    last = 0;
  }
  return prediction;
}

Reply Reading::ask(const Inquiry& inquiry) {
  Reply reply;
  reply.greedy = force(inquiry, reply);
  if (inquiry.generate == 0) return reply;
  if (!reply.greedy || inquiry.answer.size() > inquiry.generate) {
    reply.prediction = generate(inquiry);
    return reply;
  }
  // Greedy decoding would walk the same way, so it need not.
  for (const Token token : inquiry.answer) {
    reply.prediction += codec_.piece(token);
    if (share_found(reply.prediction, inquiry.references) == 1) break;
  }
  return reply;
}

void StreamingReader::read(
    std::span<const Token> context, std::size_t tokens, const Ask& ask) {
  Reading reading(streaming_opener(open_, context, tokens), codec_, usage_);
  ask(0, reading);
}

}  // namespace qfilters::eval
