#pragma once

// Private: what every user of llama.cpp in this folder shares.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include <ggml-backend.h>
#include <ggml.h>

#include "llama/handles.h"
#include "llama/model.h"
#include "llama/session.h"

namespace qfilters::llama {

/// llama.cpp rounds the cells of a context up to this.
inline constexpr std::size_t kCellPadding = 256;

[[nodiscard]] constexpr std::size_t pad_cells(std::size_t cells) noexcept {
  return (cells + kCellPadding - 1) / kCellPadding * kCellPadding;
}

/// Starts llama.cpp and takes its log, once per process.
void init_runtime();

/// While it lives, AbortHandler hears that a model is being loaded.
class LoadingScope {
 public:
  LoadingScope() noexcept;
  LoadingScope(const LoadingScope&) = delete;
  LoadingScope& operator=(const LoadingScope&) = delete;
  ~LoadingScope();
};

/// Forgets the error lines that llama.cpp logged on this thread.
void clear_log_errors();

/// The line that best explains the last failure on this thread, without the
/// name of the function that wrote it; `fallback` when nothing was logged.
[[nodiscard]] std::string log_error(std::string_view fallback);

struct ContextSpec {
  std::size_t cells = 0;  ///< rounded up by llama.cpp
  std::size_t chunk = 0;  ///< tokens per micro-batch
  int threads = 1;
  bool flash_attention = true;
  bool full_windows = false;  ///< windowed layers get all cells as well
  ggml_type cache_type = GGML_TYPE_F16;
  ggml_backend_sched_eval_callback callback = nullptr;
  void* callback_data = nullptr;
};

/// A context for one sequence on the CPU. Throws Error kRuntime with
/// llama.cpp's own reason.
[[nodiscard]] ContextHandle make_context(
    llama_model& model, const ContextSpec& spec);

/// One llama_decode of sequence 0 from `position` on. Returns llama_decode's
/// code; what llama.cpp throws becomes Error kRuntime.
[[nodiscard]] int decode(
    llama_context& context,
    std::span<const Token> tokens,
    std::size_t position,
    Logits logits);

/// Throws Error kRuntime for a code of decode() other than 0.
void check_decode(std::string_view operation, int code);

/// Throws Error kInvalidArgument unless there are 1 to `chunk` tokens, all in
/// the vocabulary.
void check_tokens(
    std::string_view operation,
    const Model& model,
    std::span<const Token> tokens,
    std::size_t chunk);

/// Throws Error kInvalidArgument for a size or thread count out of range.
void check_options(std::string_view operation, const SessionOptions& options);

/// Which tokens of the last step have logits.
struct LogitsRange {
  std::size_t begin = 0;
  std::size_t end = 0;

  [[nodiscard]] static LogitsRange of(
      Logits logits, std::size_t tokens) noexcept;
};

/// Logits of token i. Throws Error kInvalidArgument outside `range`.
[[nodiscard]] const float* logits_at(
    std::string_view operation,
    llama_context& context,
    const LogitsRange& range,
    std::size_t i);

}  // namespace qfilters::llama
