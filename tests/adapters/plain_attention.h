#pragma once

// Attention as its formula says it, in float64 and one row after another: what
// the engine's own is compared with.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "qfilters/policy.h"
#include "qfilters/sequence_cache.h"
#include "qfilters/tensor_view.h"

#include "llama/engine.h"
#include "unit/test_util.h"

namespace qfilters::llama::testing {

using Row = std::vector<double>;
using Rows = std::vector<Row>;

/// What the attention nodes of one layer got, token after token.
struct Heard {
  double scale = 0;
  double soft_cap = 0;
  std::vector<Rows> queries;  ///< [query head][token]
  std::vector<Rows> keys;     ///< [kv head][token]

  /// Query heads that share a KV head.
  [[nodiscard]] std::size_t share() const {
    return queries.size() / keys.size();
  }
};

inline void hear(const TensorView& view, std::vector<Rows>& heads) {
  heads.resize(view.heads);
  for (std::size_t h = 0; h < view.heads; ++h) {
    for (std::size_t t = 0; t < view.tokens; ++t) {
      const void* const row = view.row(0, h, t);
      Row& out = heads[h].emplace_back();
      for (std::size_t d = 0; d < view.dim; ++d) {
        out.push_back(
            view.dtype == DType::kFloat32
                ? static_cast<const float*>(row)[d]
                : test::decode(
                      view.dtype, static_cast<const std::uint16_t*>(row)[d]));
      }
    }
  }
}

/// From now on the engine's attention nodes add to `layers`.
inline void listen(Engine& engine, std::vector<Heard>& layers) {
  layers.resize(engine.model().layers().size());
  engine.on_node([&](std::size_t layer, const AttentionNode& node) {
    Heard& heard = layers[layer];
    heard.scale = node.scale;
    heard.soft_cap = node.soft_cap;
    hear(node.queries, heard.queries);
    hear(node.new_keys, heard.keys);
  });
}

/// A text read with the full cache in micro-batches of `chunk`.
inline std::vector<Heard> hear_text(
    const std::shared_ptr<const Model>& model,
    std::span<const Token> tokens,
    std::size_t chunk) {
  SessionOptions options;
  options.chunk = chunk;
  Engine engine(model, options);
  std::vector<Heard> layers;
  listen(engine, layers);
  SequenceCache cache(model->layer_shapes(), Policy::full());
  for (std::size_t i = 0; i < tokens.size(); i += chunk) {
    const std::size_t count = std::min(chunk, tokens.size() - i);
    engine.step(cache, tokens.subspan(i, count), Logits::kNone);
  }
  return layers;
}

inline double dot(const Row& a, const Row& b) {
  double sum = 0;
  for (std::size_t d = 0; d < a.size(); ++d) {
    sum += a[d] * b[d];
  }
  return sum;
}

/// The softmax of a query's products with `keys`, which are all that it sees.
inline Row attention_of(
    const Heard& layer, const Row& query, std::span<const Row> keys) {
  Row paid;
  double sum = 0;
  for (const Row& key : keys) {
    double product = layer.scale * dot(query, key);
    if (layer.soft_cap > 0) {
      product = layer.soft_cap * std::tanh(product / layer.soft_cap);
    }
    paid.push_back(std::exp(product));
    sum += paid.back();
  }
  for (double& each : paid) {
    each /= sum;
  }
  return paid;
}

}  // namespace qfilters::llama::testing
