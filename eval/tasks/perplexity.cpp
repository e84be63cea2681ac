#include "eval/tasks/perplexity.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "qfilters/error.h"

#include "eval/tasks/scoring.h"

namespace qfilters::eval {

namespace {

void check(std::size_t available, const PerplexityOptions& options) {
  if (options.tokens < 2) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "perplexity: tokens=" + std::to_string(options.tokens) +
            " leaves nothing to predict");
  }
  if (available < options.decode ||
      available - options.decode < options.tokens) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "perplexity: the text has " + std::to_string(available) +
            " tokens, but " + std::to_string(options.tokens) + " + " +
            std::to_string(options.decode) + " (decode timing) are needed");
  }
}

}  // namespace

std::size_t perplexity_from(const PerplexityOptions& options) noexcept {
  return std::min(options.from, (options.tokens - 1) / 2);
}

PerplexityResult run_perplexity(
    llama::Session& session,
    std::span<const Token> text,
    std::size_t vocabulary,
    const PerplexityOptions& options,
    const Progress& progress) {
  check(text.size(), options);
  const std::size_t tokens = options.tokens;
  const std::size_t from = perplexity_from(options);
  const std::size_t read = session.tokens().size();
  if (read > from) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "perplexity: the session has read " + std::to_string(read) +
            " tokens, but predictions count from " + std::to_string(from));
  }
  const std::size_t total = tokens + options.decode;
  PerplexityResult result;
  double nll = 0;

  for (std::size_t begin = read; begin < tokens;) {
    const std::size_t end = std::min(begin + session.chunk(), tokens);
    const std::size_t first = std::max(begin, from);
    const std::size_t last = std::min(end, tokens - 1);
    timed(result.prefill_seconds, [&] {
      session.step(
          text.subspan(begin, end - begin),
          first < last ? llama::Logits::kAll : llama::Logits::kNone);
    });
    for (std::size_t p = first; p < last; ++p) {
      nll += negative_log_likelihood(
          {session.logits(p - begin), vocabulary}, text[p + 1]);
      ++result.predictions;
    }
    begin = end;
    if (progress) progress(begin, total);
  }
  for (std::size_t p = tokens; p < total; ++p) {
    timed(result.decode_seconds, [&] {
      session.step(text.subspan(p, 1), llama::Logits::kLast);
    });
    if (progress) progress(p + 1, total);
  }

  result.prefill_tokens = tokens - read;
  result.decode_tokens = options.decode;
  result.mean_nll = nll / static_cast<double>(result.predictions);
  result.perplexity = std::exp(result.mean_nll);
  return result;
}

}  // namespace qfilters::eval
