#pragma once

#include <cstddef>
#include <span>

#include "eval/run.h"
#include "eval/text.h"
#include "llama/session.h"

namespace qfilters::eval {

struct PerplexityOptions {
  std::size_t tokens = 4096;  ///< of the text, in chunks
  /// Predictions count from this position on, where bounded caches have begun
  /// to evict; never more than half of `tokens`.
  std::size_t from = 768;
  std::size_t decode = 64;  ///< tokens after them, one by one
};

struct PerplexityResult {
  double mean_nll = 0;
  double perplexity = 0;
  std::size_t predictions = 0;
  std::size_t prefill_tokens = 0;
  std::size_t decode_tokens = 0;
  double prefill_seconds = 0;  ///< the chunked part
  double decode_seconds = 0;   ///< the one-by-one part
};

/// The first position whose prediction counts.
[[nodiscard]] std::size_t perplexity_from(
    const PerplexityOptions& options) noexcept;

/// How well the next token of a text is predicted from a bounded cache: what
/// the session has not read yet goes through it in its chunks, each chunk sees
/// the rows kept before it. The last logits at position p predict
/// token p + 1; predictions at p >= from count, within the first `tokens`
/// tokens. Then the next `decode` tokens of the text go one by one, teacher
/// forced, to time decoding at full length; they do not count.
/// `text` starts at position 0, also where the session has read some of it.
/// Throws Error kInvalidArgument for fewer than tokens + decode tokens, fewer
/// than 2, or a session beyond perplexity_from().
[[nodiscard]] PerplexityResult run_perplexity(
    llama::Session& session,
    std::span<const Token> text,
    std::size_t vocabulary,
    const PerplexityOptions& options,
    const Progress& progress = {});

}  // namespace qfilters::eval
