#include "llama/capture.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "qfilters/error.h"
#include "qfilters/policy.h"

#include "llama/engine.h"

namespace qfilters::llama {
namespace {

/// Tokens [begin, begin + count) of `view`.
TensorView slice(TensorView view, std::size_t begin, std::size_t count) {
  view.data = view.row(0, 0, begin);
  view.tokens = count;
  return view;
}

/// Copies tokens [skip, ...) of `view` to token `to` of a dense array of
/// `tokens` tokens a head.
template <typename Value>
void keep_tokens(
    const TensorView& view,
    std::size_t skip,
    std::size_t to,
    std::size_t tokens,
    std::vector<Value>& out) {
  for (std::size_t h = 0; h < view.heads; ++h) {
    for (std::size_t t = skip; t < view.tokens; ++t) {
      std::memcpy(
          &out[(h * tokens + to + t - skip) * view.dim],
          view.row(0, h, t),
          view.dim * sizeof(Value));
    }
  }
}

Capture make_capture(
    const Model& model, std::size_t tokens, std::size_t first_query) {
  Capture out;
  out.tokens = tokens;
  out.first_query = std::min(first_query, tokens);
  const std::vector<LayerShape> shapes = model.layer_shapes();
  for (std::size_t l = 0; l < shapes.size(); ++l) {
    CapturedLayer layer;
    layer.shape = shapes[l];
    layer.query_heads = model.layers()[l].query_heads;
    const std::size_t rows = layer.shape.kv_heads * tokens;
    layer.keys.resize(rows * layer.shape.key_dim);
    layer.values.resize(rows * layer.shape.value_dim);
    layer.queries.resize(
        layer.query_heads * (tokens - out.first_query) * layer.shape.key_dim);
    out.layers.push_back(std::move(layer));
  }
  return out;
}

void keep_node(
    const AttentionNode& node,
    std::size_t begin,
    const Capture& all,
    CapturedLayer& layer) {
  layer.attention.scale = node.scale;
  layer.attention.soft_cap = node.soft_cap;
  layer.attention.window = layer.shape.window;
  keep_tokens(node.new_keys, 0, begin, all.tokens, layer.keys);
  keep_tokens(node.new_values, 0, begin, all.tokens, layer.values);
  const std::size_t first = std::max(begin, all.first_query);
  keep_tokens(
      node.queries,
      first - begin,
      first - all.first_query,
      all.tokens - all.first_query,
      layer.queries);
}

}  // namespace

TensorView Capture::keys(
    std::size_t layer, std::size_t begin, std::size_t count) const {
  const CapturedLayer& l = layers[layer];
  return slice(
      TensorView::dense(
          l.keys.data(),
          DType::kFloat16,
          1,
          l.shape.kv_heads,
          tokens,
          l.shape.key_dim),
      begin,
      count);
}

TensorView Capture::values(
    std::size_t layer, std::size_t begin, std::size_t count) const {
  const CapturedLayer& l = layers[layer];
  return slice(
      TensorView::dense(
          l.values.data(),
          DType::kFloat16,
          1,
          l.shape.kv_heads,
          tokens,
          l.shape.value_dim),
      begin,
      count);
}

TensorView Capture::queries(
    std::size_t layer, std::size_t begin, std::size_t count) const {
  const CapturedLayer& l = layers[layer];
  return slice(
      TensorView::dense(
          l.queries.data(),
          DType::kFloat32,
          1,
          l.query_heads,
          tokens - first_query,
          l.shape.key_dim),
      begin - first_query,
      count);
}

Capture capture(
    std::shared_ptr<const Model> model,
    std::span<const Token> tokens,
    std::size_t first_query,
    const SessionOptions& options,
    const std::function<void(std::size_t done)>& progress) {
  if (tokens.empty()) {
    throw Error(ErrorKind::kInvalidArgument, "capture: no tokens");
  }
  Engine engine(std::move(model), options);
  SequenceOptions sequence;
  sequence.threads = options.threads;
  sequence.byte_limit = options.byte_limit;
  SequenceCache cache(engine.model().layer_shapes(), Policy::full(), sequence);
  Capture out = make_capture(engine.model(), tokens.size(), first_query);
  engine.on_node([&](std::size_t layer, const AttentionNode& node) {
    keep_node(node, cache.offset(), out, out.layers[layer]);
  });
  while (cache.offset() < tokens.size()) {
    const auto left = tokens.subspan(cache.offset());
    engine.step(
        cache, left.first(std::min(options.chunk, left.size())), Logits::kNone);
    if (progress) progress(cache.offset());
  }
  out.kv_bytes_peak = cache.stats().kv_bytes_peak + engine.native_kv_bytes();
  return out;
}

}  // namespace qfilters::llama
