#pragma once

// A small model's keys and values, and sequences fed from them.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/auto_scorer.h"
#include "qfilters/filter_bank.h"
#include "qfilters/policy.h"
#include "qfilters/scoring.h"
#include "qfilters/sequence_cache.h"

#include "unit/test_util.h"

namespace qfilters::test {

inline constexpr std::size_t kModelTokens = 300;

/// Layers with all their rows, made once.
struct Model {
  std::vector<LayerShape> layers;
  std::size_t batch = 1;
  DType dtype = DType::kFloat16;
  RowFormat format = RowFormat::kSame;
  std::vector<HalfTensor> keys;
  std::vector<HalfTensor> values;
  std::shared_ptr<const FilterBank> filters;
  std::shared_ptr<const FilterBank> of_auto;  // what policy auto scores by

  explicit Model(
      std::vector<LayerShape> shapes,
      std::size_t batch_size = 1,
      DType type = DType::kFloat16)
      : layers(std::move(shapes)), batch(batch_size), dtype(type) {
    std::vector<LayerFilters> bank;
    std::vector<LayerFilters> of_auto_bank;
    std::uint64_t seed = 10;
    for (const LayerShape& l : layers) {
      keys.push_back(random_halves(
          ++seed, dtype, batch, l.kv_heads, kModelTokens, l.key_dim, 2));
      values.push_back(random_halves(
          ++seed, dtype, batch, l.kv_heads, kModelTokens, l.value_dim));
      bank.push_back(
          {l.kv_heads,
           l.key_dim,
           random_filter(++seed, l.kv_heads * l.key_dim)});
      const std::size_t size = auto_size(l.key_dim);
      of_auto_bank.push_back(
          {l.kv_heads, size, random_filter(1000 + seed, l.kv_heads * size)});
    }
    filters = std::make_shared<const FilterBank>(bank, FilterMetadata{});
    of_auto =
        std::make_shared<const FilterBank>(of_auto_bank, FilterMetadata{});
  }

  /// What Policy::make() needs for a policy of this name, if anything.
  [[nodiscard]] const std::shared_ptr<const FilterBank>& filters_for(
      std::string_view policy) const {
    return policy == "auto" ? of_auto : filters;
  }

  [[nodiscard]] SequenceOptions options() const {
    SequenceOptions out;
    out.batch = batch;
    out.dtype = dtype;
    out.format = format;
    return out;
  }

  /// Gives every layer `count` tokens from the cache's offset on.
  void append(SequenceCache& cache, std::size_t count) const {
    cache.begin(count);
    for (std::size_t l = 0; l < layers.size(); ++l) {
      cache.append(
          l,
          keys[l].slice(cache.offset(), count),
          values[l].slice(cache.offset(), count));
    }
  }

  void feed(SequenceCache& cache, const std::vector<std::size_t>& sizes) const {
    for (const std::size_t count : sizes) {
      append(cache, count);
      cache.commit();
    }
  }
};

/// Two global layers of different shapes.
inline const Model& two_layers() {
  static const Model model({{2, 24, 24, 0}, {3, 17, 8, 0}}, 2);
  return model;
}

inline PolicyOptions budget(
    std::size_t rows,
    std::size_t sinks,
    std::size_t recent,
    std::size_t interval = 0) {
  PolicyOptions out;
  out.budget = rows;
  out.protection = {sinks, recent};
  out.interval = interval;
  return out;
}

inline Policy qfilters_policy(
    const Model& model, const PolicyOptions& options) {
  return Policy::make("qfilters", options, model.filters);
}

/// Everything a sequence stores, for comparison bit by bit.
struct Contents {
  struct Group {
    std::vector<std::int32_t> positions;
    std::vector<std::uint32_t> scores;  // as bits
    std::vector<std::uint16_t> rows;    // key and value of each row

    friend bool operator==(const Group&, const Group&) = default;
  };

  std::size_t offset = 0;
  std::vector<std::vector<Group>> layers;

  friend bool operator==(const Contents&, const Contents&) = default;
};

inline Contents contents_of(const SequenceCache& cache) {
  Contents out;
  out.offset = cache.offset();
  for (std::size_t l = 0; l < cache.layers(); ++l) {
    const KVStore& store = cache.store(l);
    const RowShape& shape = store.shape();
    auto& groups = out.layers.emplace_back(shape.groups());
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const auto positions = store.positions(g);
      groups[g].positions.assign(positions.begin(), positions.end());
      groups[g].scores = bits_of(store.scores(g));
      const std::size_t width = shape.key_dim + shape.value_dim;
      groups[g].rows.resize(store.rows(g) * width);
      for (std::size_t r = 0; r < store.rows(g); ++r) {
        std::uint16_t* row = groups[g].rows.data() + r * width;
        store.read_key(g, r, row);
        store.read_value(g, r, row + shape.key_dim);
      }
    }
  }
  return out;
}

/// The same with every head's rows sorted by position.
inline Contents in_temporal_order(const SequenceCache& cache) {
  const Contents stored = contents_of(cache);
  Contents out = stored;
  for (std::size_t l = 0; l < stored.layers.size(); ++l) {
    for (std::size_t g = 0; g < stored.layers[l].size(); ++g) {
      const auto& from = stored.layers[l][g];
      auto& to = out.layers[l][g];
      std::vector<std::size_t> order(from.positions.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::sort(order.begin(), order.end(), [&](auto a, auto b) {
        return from.positions[a] < from.positions[b];
      });
      for (std::size_t i = 0; i < order.size(); ++i) {
        const std::size_t width = from.rows.size() / order.size();
        to.positions[i] = from.positions[order[i]];
        to.scores[i] = from.scores[order[i]];
        std::copy_n(
            from.rows.begin() + static_cast<std::ptrdiff_t>(order[i] * width),
            width,
            to.rows.begin() + static_cast<std::ptrdiff_t>(i * width));
      }
    }
  }
  return out;
}

/// Stored rows are the model's rows at their positions, bit for bit.
inline void expect_true_rows(const SequenceCache& cache, const Model& model) {
  const Contents contents = contents_of(cache);
  for (std::size_t l = 0; l < cache.layers(); ++l) {
    const LayerShape& shape = cache.layer_shape(l);
    for (std::size_t g = 0; g < contents.layers[l].size(); ++g) {
      const auto& group = contents.layers[l][g];
      const std::uint16_t* row = group.rows.data();
      for (const std::int32_t position : group.positions) {
        const auto t = static_cast<std::size_t>(position);
        const std::size_t b = g / shape.kv_heads;
        const std::size_t h = g % shape.kv_heads;
        for (const auto x : model.keys[l].row(b, h, t)) {
          ASSERT_EQ(*row++, x);
        }
        for (const auto x : model.values[l].row(b, h, t)) {
          ASSERT_EQ(*row++, x);
        }
      }
    }
  }
}

/// Counters, counted again from what is stored; those of the past (peak,
/// evictions) stay zero.
inline SequenceStats recounted_stats(const SequenceCache& cache) {
  SequenceStats out;
  out.tokens = cache.offset();
  std::size_t heads = 0;
  std::size_t rows = 0;
  for (std::size_t l = 0; l < cache.layers(); ++l) {
    const KVStore& store = cache.store(l);
    const RowShape& shape = store.shape();
    out.kv_bytes_full += cache.offset() * shape.groups() * shape.row_bytes();
    for (std::size_t g = 0; g < shape.groups(); ++g) {
      const std::size_t n = store.rows(g);
      out.kv_bytes += (n + kBlockRows - 1) / kBlockRows * shape.block_bytes();
      if (cache.layer_shape(l).window != 0) continue;
      out.rows_min = heads == 0 ? n : std::min(out.rows_min, n);
      out.rows_max = std::max(out.rows_max, n);
      rows += n;
      ++heads;
    }
  }
  if (heads > 0) {
    out.rows_mean = static_cast<double>(rows) / static_cast<double>(heads);
  }
  return out;
}

/// Counters are what a recount gives. `evictions` and `rows_evicted` are the
/// caller's.
inline void expect_recounted_stats(
    const SequenceCache& cache,
    std::uint64_t evictions,
    std::uint64_t rows_evicted) {
  const SequenceStats stats = cache.stats();
  const SequenceStats want = recounted_stats(cache);
  EXPECT_EQ(stats.tokens, want.tokens);
  EXPECT_EQ(stats.rows_min, want.rows_min);
  EXPECT_EQ(stats.rows_max, want.rows_max);
  EXPECT_DOUBLE_EQ(stats.rows_mean, want.rows_mean);
  EXPECT_EQ(stats.kv_bytes, want.kv_bytes);
  EXPECT_GE(stats.kv_bytes_peak, stats.kv_bytes);
  EXPECT_EQ(stats.kv_bytes_full, want.kv_bytes_full);
  EXPECT_EQ(stats.evictions, evictions);
  EXPECT_EQ(stats.rows_evicted, rows_evicted);
}

}  // namespace qfilters::test
