#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

#include "qfilters/tensor_view.h"

struct ggml_tensor;

namespace qfilters::llama {

/// One attention node of a running graph: its inputs, and its output, which
/// the rest of the graph uses.
struct AttentionNode {
  int layer = 0;          ///< from the name of the cache tensor behind the keys
  TensorView queries;     ///< float32 [1, query_heads, tokens, key_dim]
  TensorView new_keys;    ///< float16 [1, kv_heads, tokens, key_dim]
  TensorView new_values;  ///< float16 [1, kv_heads, tokens, value_dim]
  OutputView out;         ///< float32 [1, query_heads, tokens, value_dim]
  float scale = 0;
  float soft_cap = 0;
  float max_alibi_bias = 0;
  bool has_sinks = false;
  std::size_t cache_cells = 0;  ///< cells of the layer's own cache tensor
  const ggml_tensor* mask = nullptr;
};

/// The residual stream around one attention block, float32 [1, 1, tokens,
/// width]: without what the block adds to it, and with it.
struct BlockNode {
  int layer = 0;
  TensorView before;
  TensorView after;
};

/// The tensor at the end of a chain of views: the cache tensor behind the
/// keys and values that attention reads.
[[nodiscard]] const ggml_tensor& root_tensor(
    const ggml_tensor& tensor) noexcept;

/// True if query t of the node sees exactly the cells 0..t (with a window:
/// the last `window` of them). This is what makes new token i be cell i.
/// O(tokens * cells).
[[nodiscard]] bool sees_own_cells(
    const AttentionNode& node, std::size_t window) noexcept;

/// Sees every attention node of a context (GGML_OP_FLASH_ATTN_EXT) through
/// llama.cpp's evaluation callback. Knows no cache and no policy.
///
/// Exceptions never cross the callback: the first one is kept, later nodes of
/// the same decode are left alone, and rethrow() hands it over afterwards.
class AttentionTap {
 public:
  using Handler = std::function<void(const AttentionNode&)>;

  /// `skip_native`: do not let ggml compute nodes whose output the handler
  /// overwrites anyway.
  explicit AttentionTap(Handler handler, bool skip_native = false)
      : handler_(std::move(handler)), skip_native_(skip_native) {}

  AttentionTap(const AttentionTap&) = delete;
  AttentionTap& operator=(const AttentionTap&) = delete;

  /// Also sees where attention is added to the residual stream, in models whose
  /// graph names that node as llama.cpp's decoders mostly do (ffn_inp, sa_out).
  /// Other graphs have no such nodes; what looks different inside is an error.
  void on_blocks(std::function<void(const BlockNode&)> handler) {
    on_block_ = std::move(handler);
  }

  /// The callback and its user data (this), for llama_context_params.
  static bool on_node(ggml_tensor* node, bool ask, void* tap) noexcept;

  /// Throws what a handler threw since the last call, if anything.
  void rethrow();

  /// Call after every decode, also after a failed one: a skipped node gets
  /// its operation back, because llama.cpp may run the same graph again, and
  /// an exception that nobody asked for is forgotten.
  void reset() noexcept;

 private:
  void restore() noexcept;
  void visit(ggml_tensor& node) noexcept;
  void visit_block(const ggml_tensor& node) noexcept;
  [[nodiscard]] BlockNode describe_block(const ggml_tensor& node);

  Handler handler_;
  std::function<void(const BlockNode&)> on_block_;
  const ggml_tensor* attention_ = nullptr;  // the last node of attention
  std::vector<float> before_;               // what the sum has overwritten
  bool skip_native_;
  ggml_tensor* skipped_ = nullptr;  // between the two calls for one node
  std::exception_ptr error_;
};

}  // namespace qfilters::llama
