#pragma once

// A captured text that no model has read: random keys, values and queries.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "llama/capture.h"
#include "unit/test_util.h"

namespace qfilters::test {

inline llama::Capture fake_capture(
    const std::vector<LayerShape>& layers,
    std::size_t share,
    std::size_t tokens,
    std::size_t first_query = 0) {
  llama::Capture out;
  out.tokens = tokens;
  out.first_query = first_query;
  std::uint64_t seed = 40;
  for (const LayerShape& shape : layers) {
    const auto halves = [&](std::size_t dim) {
      const auto data =
          random_halves(++seed, DType::kFloat16, 1, shape.kv_heads, tokens, dim)
              .data();
      return std::vector<std::uint16_t>(data.begin(), data.end());
    };
    llama::CapturedLayer layer;
    layer.shape = shape;
    layer.query_heads = share * shape.kv_heads;
    layer.attention.window = shape.window;
    layer.keys = halves(shape.key_dim);
    layer.values = halves(shape.value_dim);
    layer.queries = random_filter(
        ++seed, layer.query_heads * (tokens - first_query) * shape.key_dim);
    out.layers.push_back(std::move(layer));
  }
  return out;
}

}  // namespace qfilters::test
