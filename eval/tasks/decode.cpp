#include "eval/tasks/decode.h"

#include <algorithm>
#include <string>

#include "qfilters/error.h"
#include "qfilters/limits.h"

#include "eval/tasks/scoring.h"

namespace qfilters::eval {

namespace {

[[noreturn]] void refuse(const std::string& reason) {
  throw Error(ErrorKind::kInvalidArgument, "decode: " + reason);
}

}  // namespace

void check_decode_options(const DecodeOptions& options) {
  if (options.contexts.empty() || options.tokens == 0) {
    refuse("there must be a context, and a token to decode at it");
  }
  constexpr std::size_t kMost = kMostTokens / 2;  // their sum must fit too
  std::size_t end = 0;
  for (const std::size_t context : options.contexts) {
    if (context > kMost || options.tokens > kMost) {
      refuse("contexts and tokens must be at most " + std::to_string(kMost));
    }
    if (context <= end) {
      refuse(
          "context " + std::to_string(context) + " is not beyond the " +
          std::to_string(end) + " tokens before it");
    }
    end = context + options.tokens;
  }
}

std::size_t decode_text_tokens(const DecodeOptions& options) {
  return options.contexts.back() + options.tokens;
}

std::vector<DecodePoint> run_decode(
    llama::Session& session,
    std::span<const Token> text,
    const DecodeOptions& options,
    const Progress& progress) {
  check_decode_options(options);
  const std::size_t total = decode_text_tokens(options);
  if (text.size() < total) {
    refuse(
        "the text has " + std::to_string(text.size()) + " tokens, but " +
        std::to_string(total) + " are needed");
  }
  std::size_t done = 0;
  const auto step = [&](double& seconds, std::size_t count) {
    timed(seconds, [&] {
      session.step(text.subspan(done, count), llama::Logits::kLast);
    });
    done += count;
    if (progress) progress(done, total);
  };
  std::vector<DecodePoint> points;
  DecodePoint point;
  for (const std::size_t context : options.contexts) {
    point.context = context;
    point.decode_seconds = 0;
    while (done < context) {
      const std::size_t count = std::min(session.chunk(), context - done);
      step(point.prefill_seconds, count);
      point.prefill_tokens += count;
    }
    while (done < context + options.tokens)
      step(point.decode_seconds, 1);
    const llama::SessionStats stats = session.stats();
    point.attention_seconds = stats.attention_seconds;
    point.eviction_seconds = stats.eviction_seconds;
    point.kv_bytes_peak = stats.kv_bytes_peak;
    points.push_back(point);
  }
  return points;
}

}  // namespace qfilters::eval
