#include "llama/probe.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>

#include <ggml.h>
#include <llama.h>

#include "qfilters/error.h"

#include "llama/attention_tap.h"
#include "llama/runtime.h"

namespace qfilters::llama {
namespace {

constexpr std::size_t kTokens = 8;
// The probe's context must be longer than the window.
constexpr std::int32_t kMaxWindow = 1 << 16;

[[noreturn]] void refuse(const std::string& reason) {
  throw Error(ErrorKind::kUnsupported, reason);
}

// Operations that only move or name memory of the cache.
bool moves_rows(ggml_op op) noexcept {
  switch (op) {
    case GGML_OP_NONE:
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
    case GGML_OP_CPY:
    case GGML_OP_SET_ROWS:
      return true;
    default:
      return false;
  }
}

class Probe {
 public:
  Probe(llama_model& model, int threads)
      : model_(model),
        threads_(threads),
        tap_([this](const AttentionNode& node) { on_attention(node); }) {}

  std::vector<AttentionLayer> run();

 private:
  static bool on_node(ggml_tensor* node, bool ask, void* probe) noexcept;
  void on_attention(const AttentionNode& node);
  [[nodiscard]] AttentionLayer checked_layer(const AttentionNode& node) const;

  llama_model& model_;
  int threads_;
  AttentionTap tap_;
  std::size_t window_ = 0;  // of windowed layers
  std::size_t cells_ = 0;   // of global layers
  std::map<int, AttentionLayer> layers_;
  const char* stray_ = nullptr;  // an operation that computes with the cache
};

// Attention outside the tapped nodes would read the cache we keep empty.
bool Probe::on_node(ggml_tensor* node, bool ask, void* probe) noexcept {
  auto& self = *static_cast<Probe*>(probe);
  if (ask && node->op != GGML_OP_FLASH_ATTN_EXT && !moves_rows(node->op)) {
    for (const ggml_tensor* source : node->src) {
      if (source == nullptr) continue;
      const std::string_view name = ggml_get_name(&root_tensor(*source));
      if (name.starts_with("cache_")) self.stray_ = ggml_op_name(node->op);
    }
  }
  return AttentionTap::on_node(node, ask, &self.tap_);
}

AttentionLayer Probe::checked_layer(const AttentionNode& node) const {
  const std::string layer = "layer " + std::to_string(node.layer);
  if (node.max_alibi_bias != 0) refuse(layer + " uses ALiBi position biases");
  if (node.has_sinks) refuse(layer + " uses attention sinks");
  if (layers_.contains(node.layer)) {
    refuse(layer + "'s KV cache is shared by several layers");
  }
  if (node.queries.tokens != kTokens || node.out.tokens != kTokens) {
    refuse(layer + " does not attend for every token");
  }
  if (node.queries.dtype != DType::kFloat32 ||
      node.new_keys.dtype != DType::kFloat16 ||
      node.new_values.dtype != DType::kFloat16) {
    refuse(layer + " attends with other types than f32 queries and f16 rows");
  }
  if (!std::isfinite(node.scale) || !(node.soft_cap >= 0) ||
      !std::isfinite(node.soft_cap)) {
    refuse(
        layer + "'s scale " + std::to_string(node.scale) + " or soft cap " +
        std::to_string(node.soft_cap) + " makes no sense");
  }
  const std::size_t kv_heads = node.new_keys.heads;
  if (kv_heads == 0 || node.queries.heads % kv_heads != 0 ||
      node.new_values.heads != kv_heads ||
      node.new_keys.dim != node.queries.dim) {
    refuse(layer + "'s queries, keys and values do not fit together");
  }
  const bool windowed = node.cache_cells < cells_;
  if (windowed && window_ == 0) refuse(layer + "'s KV cache is cut short");
  AttentionLayer result;
  result.index = node.layer;
  result.query_heads = node.queries.heads;
  result.kv_heads = kv_heads;
  result.key_dim = node.new_keys.dim;
  result.value_dim = node.new_values.dim;
  result.window = windowed ? window_ : 0;
  result.scale = node.scale;
  result.soft_cap = node.soft_cap;
  // A chunked or symmetric window, or a mask that is not causal, shows here.
  if (!sees_own_cells(node, result.window)) {
    refuse(layer + "'s mask is neither causal nor a standard sliding window");
  }
  return result;
}

void Probe::on_attention(const AttentionNode& node) {
  layers_.emplace(node.layer, checked_layer(node));
}

std::vector<AttentionLayer> Probe::run() {
  const std::int32_t window = llama_model_n_swa(&model_);
  if (window < 0 || window > kMaxWindow) {
    refuse("its sliding window of " + std::to_string(window) + " is too long");
  }
  window_ = static_cast<std::size_t>(window);
  ContextSpec spec;
  // Longer than a windowed layer's own cache, so that the two differ.
  spec.cells = pad_cells(window_ + kTokens) + kCellPadding;
  spec.chunk = kTokens;
  spec.threads = threads_;
  spec.callback = on_node;
  spec.callback_data = this;
  const ContextHandle context = make_context(model_, spec);
  if (llama_get_memory(context.get()) == nullptr) {
    refuse("it has no KV cache (an embedding model?)");
  }
  cells_ = llama_n_ctx(context.get());

  const std::int32_t vocabulary =
      llama_vocab_n_tokens(llama_model_get_vocab(&model_));
  if (vocabulary <= 0) refuse("it has no vocabulary");
  std::array<Token, kTokens> tokens = {};
  for (std::size_t i = 0; i < kTokens; ++i) {
    tokens[i] = static_cast<Token>(i) % vocabulary;
  }
  // Across the end of the first window: chunked windows start anew there.
  const std::size_t position = window_ > 4 ? window_ - 4 : 0;
  const int code = decode(*context, tokens, position, Logits::kLast);
  tap_.rethrow();
  check_decode("probe", code);
  if (stray_ != nullptr) {
    refuse(
        std::string("it computes with its KV cache outside flash attention (") +
        stray_ + ")");
  }
  if (layers_.empty()) refuse("no flash attention node was computed");

  std::vector<AttentionLayer> result;
  for (const auto& [index, layer] : layers_) {
    result.push_back(layer);
  }
  return result;
}

}  // namespace

std::vector<AttentionLayer> probe_layers(llama_model& model, int threads) {
  return Probe(model, threads).run();
}

}  // namespace qfilters::llama
