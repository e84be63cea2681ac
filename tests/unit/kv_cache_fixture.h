#pragma once

// Rows for one attention layer, and caches fed from them.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "qfilters/config.h"
#include "qfilters/filter_bank.h"
#include "qfilters/kv_cache.h"

#include "unit/test_util.h"

namespace qfilters::test {

/// Keys, values and filters of one layer; both types hold the same tokens.
struct LayerData {
  std::size_t batch;
  std::size_t heads;
  std::size_t dim;
  std::size_t value_dim;
  HalfTensor keys;
  HalfTensor values;
  LayerFilters filters;

  explicit LayerData(
      std::size_t tokens = 120,
      DType dtype = DType::kFloat16,
      std::size_t key_dim = 20,
      std::size_t dv = 20,
      std::size_t batch_size = 2,
      std::size_t kv_heads = 3)
      : batch(batch_size),
        heads(kv_heads),
        dim(key_dim),
        value_dim(dv),
        keys(random_halves(1, dtype, batch, heads, tokens, dim, 4)),
        values(random_halves(2, dtype, batch, heads, tokens, value_dim, 1)),
        filters{heads, dim, random_filter(3, heads * dim)} {}

  [[nodiscard]] std::size_t groups() const { return batch * heads; }

  /// The next `count` tokens into `cache`.
  RowsView feed(
      QFiltersKVCache& cache,
      std::size_t count,
      Inputs inputs = Inputs::kCopied) const {
    const std::size_t first = cache.offset();
    return cache.update_and_fetch(
        keys.slice(first, count), values.slice(first, count), inputs);
  }

  [[nodiscard]] float score(
      std::size_t group, std::size_t token, float sign = 1.0F) const {
    return canonical_score(
        keys.view().dtype,
        keys.row(group / heads, group % heads, token),
        filters.head(group % heads),
        sign);
  }

  /// Row `r` of `group` in `view` is token `token`, bit for bit.
  [[nodiscard]] bool is_token(
      const RowsView& view,
      std::size_t group,
      std::size_t r,
      std::size_t token) const {
    std::vector<std::uint16_t> key(dim);
    std::vector<std::uint16_t> value(value_dim);
    view.read_key(group, r, key.data());
    view.read_value(group, r, value.data());
    const std::size_t b = group / heads;
    const std::size_t h = group % heads;
    return std::ranges::equal(key, keys.row(b, h, token)) &&
           std::ranges::equal(value, values.row(b, h, token)) &&
           view.position(group, r) == static_cast<std::int32_t>(token);
  }
};

/// Quiet about retention.
inline Config config_of(
    std::int64_t budget,
    std::int64_t sinks,
    std::int64_t recent = 0,
    std::int64_t interval = 0) {
  Config config;
  config.qfilters_budget = budget;
  config.qfilters_n_sink = sinks;
  config.qfilters_recent = recent;
  config.qfilters_interval = interval;
  config.qfilters_on_low_retention = "ignore";
  return config;
}

}  // namespace qfilters::test
