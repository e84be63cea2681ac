#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "qfilters/attention.h"
#include "qfilters/sequence_cache.h"
#include "qfilters/tensor_view.h"

#include "llama/model.h"
#include "llama/session.h"

namespace qfilters::llama {

/// What one attention layer got while a text was read.
struct CapturedLayer {
  LayerShape shape;
  std::size_t query_heads = 0;
  AttentionOptions attention;         ///< scale, soft cap, window; one thread
  std::vector<std::uint16_t> keys;    ///< float16 [kv_heads, tokens, key_dim]
  std::vector<std::uint16_t> values;  ///< float16 [kv_heads, tokens, value_dim]
  /// float32 [query_heads, tokens - first_query, key_dim]
  std::vector<float> queries;
};

/// What attention got while a model read a text with the full cache: enough to
/// see what any policy would keep of it, without the model. In memory as large
/// as the full cache, and for each token whose queries are kept
/// query_heads * key_dim * 4 bytes a layer.
struct Capture {
  std::size_t tokens = 0;
  std::size_t first_query = 0;    ///< queries are kept from this token on
  std::size_t kv_bytes_peak = 0;  ///< of the cache that was read with
  std::vector<CapturedLayer> layers;

  /// Views of tokens [begin, begin + count), which must lie within `tokens`,
  /// those of queries from first_query on.
  [[nodiscard]] TensorView keys(
      std::size_t layer, std::size_t begin, std::size_t count) const;
  [[nodiscard]] TensorView values(
      std::size_t layer, std::size_t begin, std::size_t count) const;
  [[nodiscard]] TensorView queries(
      std::size_t layer, std::size_t begin, std::size_t count) const;
};

/// Reads `tokens` from position 0 on in micro-batches of options.chunk and
/// keeps keys and values of all of them, and queries from token `first_query`
/// on (tokens.size() or more: none). While it reads, the cache it reads with
/// lies in memory too. `progress` hears the number of tokens done after each
/// micro-batch. Throws Error kInvalidArgument without tokens, and what the
/// engine throws.
[[nodiscard]] Capture capture(
    std::shared_ptr<const Model> model,
    std::span<const Token> tokens,
    std::size_t first_query,
    const SessionOptions& options,
    const std::function<void(std::size_t done)>& progress = {});

}  // namespace qfilters::llama
