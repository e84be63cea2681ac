#include "llama/attention_tap.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include <ggml-backend.h>
#include <ggml.h>

#include "qfilters/error.h"

namespace qfilters::llama {
namespace {

[[noreturn]] void refuse(const std::string& reason) {
  throw Error(ErrorKind::kUnsupported, reason);
}

// The number N at the end of "<prefix>N", or -1.
int layer_number(std::string_view name, std::string_view prefix) noexcept {
  if (!name.starts_with(prefix)) return -1;
  name.remove_prefix(prefix.size());
  int layer = -1;
  const auto [end, code] =
      std::from_chars(name.data(), name.data() + name.size(), layer);
  const bool whole = code == std::errc() && end == name.data() + name.size();
  return whole ? layer : -1;
}

bool is_host(const ggml_tensor& tensor) noexcept {
  const ggml_backend_buffer_t buffer = root_tensor(tensor).buffer;
  return buffer != nullptr && ggml_backend_buffer_is_host(buffer);
}

std::ptrdiff_t stride(const ggml_tensor& tensor, int axis) noexcept {
  return static_cast<std::ptrdiff_t>(
      tensor.nb[axis] / ggml_type_size(tensor.type));
}

std::size_t extent(const ggml_tensor& tensor, int axis) noexcept {
  return static_cast<std::size_t>(tensor.ne[axis]);
}

DType dtype_of(const ggml_tensor& tensor) {
  switch (tensor.type) {
    case GGML_TYPE_F32:
      return DType::kFloat32;
    case GGML_TYPE_F16:
      return DType::kFloat16;
    case GGML_TYPE_BF16:
      return DType::kBFloat16;
    default:
      refuse(
          std::string("attention reads rows of type ") +
          ggml_type_name(tensor.type));
  }
}

// `tensor` [dim, rows, heads]: its first `tokens` rows.
TensorView rows_of(const ggml_tensor& tensor, std::size_t tokens) {
  if (tensor.nb[0] != ggml_type_size(tensor.type)) {
    refuse("attention reads transposed rows");
  }
  TensorView view;
  view.data = tensor.data;
  view.dtype = dtype_of(tensor);
  view.batch = 1;
  view.heads = extent(tensor, 2);
  view.tokens = tokens;
  view.dim = extent(tensor, 0);
  view.token_stride = stride(tensor, 1);
  view.head_stride = stride(tensor, 2);
  view.batch_stride = stride(tensor, 3);
  return view;
}

// `tensor` [dim, heads, tokens].
OutputView output_of(const ggml_tensor& tensor) noexcept {
  OutputView view;
  view.data = static_cast<float*>(tensor.data);
  view.batch = 1;
  view.heads = extent(tensor, 1);
  view.tokens = extent(tensor, 2);
  view.dim = extent(tensor, 0);
  view.head_stride = stride(tensor, 1);
  view.token_stride = stride(tensor, 2);
  view.batch_stride = stride(tensor, 3);
  return view;
}

int layer_of(const ggml_tensor& keys, const ggml_tensor& values) {
  const ggml_tensor& key_root = root_tensor(keys);
  const int layer = layer_number(ggml_get_name(&key_root), "cache_k_l");
  if (layer < 0) {
    refuse(
        std::string("attention reads keys from '") + ggml_get_name(&key_root) +
        "', which is no plain KV cache");
  }
  const ggml_tensor& value_root = root_tensor(values);
  if (layer_number(ggml_get_name(&value_root), "cache_v_l") != layer) {
    refuse(
        "layer " + std::to_string(layer) + " reads values from '" +
        ggml_get_name(&value_root) + "' (multi-head latent attention?)");
  }
  if (keys.data != key_root.data || values.data != value_root.data ||
      keys.ne[3] != 1) {
    refuse(
        "layer " + std::to_string(layer) +
        " does not read its cache from the first cell on");
  }
  return layer;
}

AttentionNode describe(const ggml_tensor& node) {
  const ggml_tensor& queries = *node.src[0];
  const ggml_tensor& keys = *node.src[1];
  const ggml_tensor& values = *node.src[2];
  AttentionNode result;
  result.layer = layer_of(keys, values);
  for (const ggml_tensor* tensor : {&queries, &keys, &values, &node}) {
    if (!is_host(*tensor)) {
      refuse(
          "attention of layer " + std::to_string(result.layer) +
          " runs outside the host's memory: a model on another device needs "
          "state rewriting, which this version does not have");
    }
  }
  const std::size_t tokens = extent(queries, 1);
  result.queries = rows_of(queries, tokens);
  result.new_keys = rows_of(keys, tokens);
  result.new_values = rows_of(values, tokens);
  result.out = output_of(node);
  std::array<float, 3> params = {};
  std::memcpy(params.data(), node.op_params, sizeof(params));
  result.scale = params[0];
  result.max_alibi_bias = params[1];
  result.soft_cap = params[2];
  result.mask = node.src[3];
  result.has_sinks = node.src[4] != nullptr;
  result.cache_cells = extent(root_tensor(keys), 1);
  return result;
}

// Whether `tensor` is computed from `origin`, in no more steps than lie between
// attention and the sum behind it.
bool comes_from(
    const ggml_tensor* tensor, const ggml_tensor* origin, int steps) noexcept {
  if (tensor == origin) return true;
  if (tensor == nullptr || steps == 0) return false;
  return comes_from(tensor->src[0], origin, steps - 1) ||
         comes_from(tensor->src[1], origin, steps - 1);
}

// The layer behind whose attention this sum is, or -1.
int block_of(const ggml_tensor& node) noexcept {
  if (node.op != GGML_OP_ADD) return -1;
  const std::string_view name = ggml_get_name(&node);
  return std::max(
      layer_number(name, "ffn_inp-"), layer_number(name, "sa_out-"));
}

TensorView stream_of(const ggml_tensor& like, const void* data) noexcept {
  return TensorView::dense(
      data, DType::kFloat32, 1, 1, extent(like, 1), extent(like, 0));
}

}  // namespace

const ggml_tensor& root_tensor(const ggml_tensor& tensor) noexcept {
  const ggml_tensor* root = &tensor;
  while (root->view_src != nullptr) {
    root = root->view_src;
  }
  return *root;
}

bool sees_own_cells(const AttentionNode& node, std::size_t window) noexcept {
  constexpr std::uint16_t kVisible = 0x0000;  // 0 as float16
  constexpr std::uint16_t kMasked = 0xFC00;   // -infinity
  const ggml_tensor* mask = node.mask;
  const std::size_t tokens = node.queries.tokens;
  if (mask == nullptr || mask->type != GGML_TYPE_F16 || !is_host(*mask) ||
      mask->nb[0] != sizeof(std::uint16_t) || extent(*mask, 0) < tokens ||
      extent(*mask, 1) < tokens) {
    return false;
  }
  const std::size_t cells = extent(*mask, 0);
  for (std::size_t t = 0; t < tokens; ++t) {
    const auto* row = reinterpret_cast<const std::uint16_t*>(
        static_cast<const std::byte*>(mask->data) + t * mask->nb[1]);
    const std::size_t first = window == 0 || t < window ? 0 : t + 1 - window;
    for (std::size_t cell = 0; cell < cells; ++cell) {
      const bool visible = cell >= first && cell <= t;
      if (row[cell] != (visible ? kVisible : kMasked)) return false;
    }
  }
  return true;
}

bool AttentionTap::on_node(ggml_tensor* node, bool ask, void* tap) noexcept {
  auto& self = *static_cast<AttentionTap*>(tap);
  if (ask) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT)
      return self.on_block_ && block_of(*node) >= 0;
    if (self.skip_native_) {
      // ggml's CPU backend passes over nodes without an operation.
      node->op = GGML_OP_NONE;
      self.skipped_ = node;
    }
    return true;
  }
  self.restore();
  if (node->op == GGML_OP_FLASH_ATTN_EXT) {
    self.visit(*node);
  } else {
    self.visit_block(*node);
  }
  return true;
}

void AttentionTap::reset() noexcept {
  restore();
  error_ = nullptr;
}

void AttentionTap::restore() noexcept {
  if (skipped_ != nullptr) skipped_->op = GGML_OP_FLASH_ATTN_EXT;
  skipped_ = nullptr;
}

BlockNode AttentionTap::describe_block(const ggml_tensor& node) {
  constexpr int kSteps = 10;
  const ggml_tensor* added = node.src[0];
  const ggml_tensor* stream = node.src[1];
  const bool first = comes_from(added, attention_, kSteps);
  if (!first) std::swap(added, stream);
  bool fits = attention_ != nullptr &&
              first != comes_from(node.src[1], attention_, kSteps);
  for (const ggml_tensor* tensor : {&node, added, stream}) {
    fits = fits && tensor->type == GGML_TYPE_F32 && is_host(*tensor) &&
           ggml_is_contiguous(tensor) && ggml_are_same_shape(tensor, &node);
  }
  if (!fits) {
    refuse(
        std::string("'") + ggml_get_name(&node) +
        "' does not add attention to a residual stream");
  }
  BlockNode result;
  result.layer = block_of(node);
  result.after = stream_of(node, node.data);
  result.before = stream_of(node, stream->data);
  if (stream->data == node.data) {  // the sum was written over it
    const auto* const sum = static_cast<const float*>(node.data);
    const auto* const part = static_cast<const float*>(added->data);
    before_.resize(static_cast<std::size_t>(ggml_nelements(&node)));
    for (std::size_t i = 0; i < before_.size(); ++i)
      before_[i] = sum[i] - part[i];
    result.before = stream_of(node, before_.data());
  }
  return result;
}

void AttentionTap::visit_block(const ggml_tensor& node) noexcept {
  if (error_ != nullptr) return;
  try {
    on_block_(describe_block(node));
  } catch (...) {
    error_ = std::current_exception();
  }
}

void AttentionTap::visit(ggml_tensor& node) noexcept {
  attention_ = &node;
  if (error_ == nullptr) {
    try {
      handler_(describe(node));
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  // The rest of the graph still runs: give it numbers, not old memory.
  if (error_ != nullptr && skip_native_ && is_host(node)) {
    std::memset(node.data, 0, ggml_nbytes(&node));
  }
}

void AttentionTap::rethrow() {
  if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
}

}  // namespace qfilters::llama
