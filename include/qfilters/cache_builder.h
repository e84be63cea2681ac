#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "qfilters/config.h"
#include "qfilters/filter_bank.h"
#include "qfilters/kv_cache.h"

namespace qfilters {

/// What a model's layers look like to a cache.
struct ModelShape {
  /// KV heads and key dimension of an attention layer.
  struct Attention {
    std::size_t kv_heads = 0;
    std::size_t key_dim = 0;
  };

  /// All layers in order; none: a layer without attention.
  std::vector<std::optional<Attention>> layers;
  /// The model's fingerprint as filter files record it; "" = unknown.
  std::string fingerprint;
};

/// Makes the caches of a model; the reference system's KVCacheBuilder.
class CacheBuilder {
 public:
  /// One independent cache per attention layer; a layer without attention gets
  /// none. `filters` holds one entry per attention layer, in order; without it
  /// each cache falls back to the key-SVD direction. Sizes come with a cache's
  /// first update. Throws Error as validate() does, kInvalidArgument for a
  /// model without attention or a size of zero or beyond limits.h, kMismatch
  /// naming both sides when the filters belong to another model. O(filters).
  [[nodiscard]] static std::vector<std::optional<QFiltersKVCache>> for_model(
      const ModelShape& model,
      const Config& config = {},
      const FilterBank* filters = nullptr);
};

}  // namespace qfilters
