#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "eval/run.h"
#include "eval/text.h"
#include "llama/session.h"

namespace qfilters::eval {

struct DecodeOptions {
  /// Tokens in the sequence when decoding is timed; ascending.
  std::vector<std::size_t> contexts{1024, 2048, 4096, 8192};
  std::size_t tokens = 32;  ///< decoded one by one at each of them
};

/// What a session did until the decoding at one context was over.
struct DecodePoint {
  std::size_t context = 0;
  std::size_t prefill_tokens = 0;  ///< since the start, without decoded ones
  double prefill_seconds = 0;      ///< of these
  double decode_seconds = 0;       ///< of the tokens decoded here
  double attention_seconds = 0;    ///< since the start
  double eviction_seconds = 0;
  std::size_t kv_bytes_peak = 0;
};

/// Throws Error kInvalidArgument unless contexts ascend by more than the
/// decoded tokens.
void check_decode_options(const DecodeOptions& options);

/// Tokens of text a run needs.
[[nodiscard]] std::size_t decode_text_tokens(const DecodeOptions& options);

/// Times a session: the text comes in by chunks up to each context, then
/// token by token. `progress` hears every step. Throws as
/// check_decode_options(), also for a text that is too short.
[[nodiscard]] std::vector<DecodePoint> run_decode(
    llama::Session& session,
    std::span<const Token> text,
    const DecodeOptions& options,
    const Progress& progress = {});

}  // namespace qfilters::eval
