// What holds of a QFiltersKVCache for any rows, shapes, budgets and updates.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "qfilters/kv_cache.h"

#include "unit/generators.h"
#include "unit/kv_cache_fixture.h"

namespace qfilters {
namespace {

using test::any_bounds;
using test::any_filter;
using test::any_of;
using test::any_split;
using test::assert_best_rows;
using test::bits_of;
using test::Bounds;
using test::HalfTensor;
using test::LayerData;

LayerData any_layer() {
  const DType dtype = *rc::gen::element(DType::kFloat16, DType::kBFloat16);
  LayerData data(
      any_of(0, 200),
      dtype,
      any_of(1, 20),
      any_of(1, 6),
      any_of(1, 2),
      any_of(1, 3));
  fill_with_any_kind(data.keys);
  fill_with_any_kind(data.values);
  data.filters.values = any_filter(data.heads * data.dim);
  return data;
}

std::size_t tokens_of(const LayerData& data) {
  return data.keys.view().tokens;
}

Config any_config(const Bounds& bounds, const LayerData& data) {
  Config config = test::config_of(
      static_cast<std::int64_t>(bounds.budget),
      static_cast<std::int64_t>(bounds.protection.sinks),
      static_cast<std::int64_t>(bounds.protection.recent),
      static_cast<std::int64_t>(bounds.interval));
  config.qfilters_sign = *rc::gen::element(1, -1);
  config.qfilters_calib_tokens =
      static_cast<std::int64_t>(any_of(1, tokens_of(data) + 20));
  return config;
}

/// Calibrated, or finding its filters on the way.
QFiltersKVCache make_cache(
    const Config& config, const LayerData& data, bool calibrated) {
  if (calibrated) return {config, data.filters};
  return QFiltersKVCache(config);
}

void feed(
    QFiltersKVCache& cache,
    const LayerData& data,
    const std::vector<std::size_t>& updates) {
  for (const std::size_t count : updates) {
    data.feed(cache, count);
  }
}

void assert_same(QFiltersKVCache& a, QFiltersKVCache& b) {
  RC_ASSERT(a.offset() == b.offset());
  RC_ASSERT(a.empty() == b.empty());
  RC_ASSERT(a.tokens_kept() == b.tokens_kept());
  RC_ASSERT(a.tokens_seen() == b.tokens_seen());
  RC_ASSERT(a.nbytes() == b.nbytes());
  RC_ASSERT(a.qfilters_kept_bytes() == b.qfilters_kept_bytes());
  RC_ASSERT(a.full_seq_bytes() == b.full_seq_bytes());
  RC_ASSERT(a.compression_ratio() == b.compression_ratio());
  RC_ASSERT(a.non_finite_scores() == b.non_finite_scores());
  const auto x = a.states();
  const auto y = b.states();
  RC_ASSERT(x.size() == y.size());
  for (std::size_t g = 0; g < x.size(); ++g) {
    RC_ASSERT(x[g].positions == y[g].positions);
    RC_ASSERT(x[g].keys == y[g].keys);
    RC_ASSERT(x[g].values == y[g].values);
    RC_ASSERT(bits_of(x[g].scores) == bits_of(y[g].scores));
    RC_ASSERT(bits_of(x[g].filter_dir) == bits_of(y[g].filter_dir));
  }
}

RC_GTEST_PROP(KVCachePropertyTest, KeepsTheBestRowsOfAllItHasSeen, ()) {
  const LayerData data = any_layer();
  const Bounds bounds = any_bounds(0);
  QFiltersKVCache cache(any_config(bounds, data), data.filters);
  feed(cache, data, any_split(tokens_of(data)));
  const auto sign = static_cast<float>(cache.config().qfilters_sign);
  const auto states = cache.states();
  for (std::size_t g = 0; g < states.size(); ++g) {
    RC_ASSERT(
        states[g].positions.size() == std::min(tokens_of(data), bounds.budget));
    std::vector<float> scores;
    for (std::size_t t = 0; t < tokens_of(data); ++t) {
      scores.push_back(data.score(g, t, sign));
    }
    assert_best_rows(states[g].positions, scores, bounds.protection);
  }
}

RC_GTEST_PROP(KVCachePropertyTest, KeepsTheSameHoweverTheTokensAreSplit, ()) {
  const LayerData data = any_layer();
  RC_PRE(tokens_of(data) > 0U);
  QFiltersKVCache whole(any_config(any_bounds(0), data), data.filters);
  data.feed(whole, tokens_of(data));
  QFiltersKVCache split(whole.config(), data.filters);
  feed(split, data, any_split(tokens_of(data)));
  assert_same(whole, split);
}

std::unique_ptr<HalfTensor> copy_of(
    const HalfTensor& rows, std::size_t first, std::size_t count) {
  const TensorView& all = rows.view();
  auto out = std::make_unique<HalfTensor>(
      all.dtype, all.batch, all.heads, count, all.dim, 3);
  for (std::size_t b = 0; b < all.batch; ++b) {
    for (std::size_t h = 0; h < all.heads; ++h) {
      for (std::size_t t = 0; t < count; ++t) {
        std::ranges::copy(rows.row(b, h, first + t), out->row(b, h, t).begin());
      }
    }
  }
  return out;
}

RC_GTEST_PROP(KVCachePropertyTest, KeepsTheSameWhoeverHoldsTheNewRows, ()) {
  const LayerData data = any_layer();
  const Config config = any_config(any_bounds(30), data);
  const bool calibrated = *rc::gen::arbitrary<bool>();
  QFiltersKVCache copying = make_cache(config, data, calibrated);
  QFiltersKVCache borrowing = make_cache(config, data, calibrated);
  std::unique_ptr<const HalfTensor> lent_keys;
  std::unique_ptr<const HalfTensor> lent_values;
  for (const std::size_t count : any_split(tokens_of(data))) {
    const std::size_t first = copying.offset();
    data.feed(copying, count);
    auto keys = copy_of(data.keys, first, count);
    auto values = copy_of(data.values, first, count);
    const bool borrow = *rc::gen::arbitrary<bool>();
    borrowing.update_and_fetch(
        keys->view(),
        values->view(),
        borrow ? Inputs::kBorrowed : Inputs::kCopied);
    // What was lent before, and rows that are copied, end here.
    lent_keys = borrow ? std::move(keys) : nullptr;
    lent_values = borrow ? std::move(values) : nullptr;
    if (*rc::gen::arbitrary<bool>()) assert_same(copying, borrowing);
  }
  assert_same(copying, borrowing);
  RC_ASSERT(copying.save() == borrowing.save());
}

RC_GTEST_PROP(KVCachePropertyTest, ShowsStoredRowsThenEveryNewOne, ()) {
  const LayerData data = any_layer();
  QFiltersKVCache cache = make_cache(
      any_config(any_bounds(30), data), data, *rc::gen::arbitrary<bool>());
  for (const std::size_t count : any_split(tokens_of(data))) {
    const auto before = cache.states();
    const std::size_t first = cache.offset();
    const RowsView view = data.feed(cache, count);
    for (std::size_t g = 0; g < data.groups(); ++g) {
      const std::size_t stored =
          before.empty() ? 0 : before[g].positions.size();
      RC_ASSERT(view.rows(g) == stored + count);
      for (std::size_t r = 0; r < view.rows(g); ++r) {
        const std::size_t token =
            r < stored ? static_cast<std::size_t>(before[g].positions[r])
                       : first + r - stored;
        RC_ASSERT(data.is_token(view, g, r, token));
      }
    }
  }
}

RC_GTEST_PROP(KVCachePropertyTest, GoesOnFromASnapshotAsIfFromItself, ()) {
  const LayerData data = any_layer();
  const Config config = any_config(any_bounds(30), data);
  const bool calibrated = *rc::gen::arbitrary<bool>();
  QFiltersKVCache straight = make_cache(config, data, calibrated);
  QFiltersKVCache resumed = make_cache(config, data, calibrated);
  const auto updates = any_split(tokens_of(data));
  const std::size_t at = any_of(0, updates.size());
  for (std::size_t i = 0; i <= updates.size(); ++i) {
    if (i == at) resumed.restore(straight.save());
    if (i < updates.size()) data.feed(straight, updates[i]);
    if (i < updates.size() && i >= at) data.feed(resumed, updates[i]);
    if (i >= at) assert_same(straight, resumed);
  }
  RC_ASSERT(straight.save() == resumed.save());
}

RC_GTEST_PROP(KVCachePropertyTest, CountsWhatARecountGives, ()) {
  const LayerData data = any_layer();
  QFiltersKVCache cache = make_cache(
      any_config(any_bounds(30), data), data, *rc::gen::arbitrary<bool>());
  for (const std::size_t count : any_split(tokens_of(data))) {
    data.feed(cache, count);
    const std::uint64_t before = cache.qfilters_kept_bytes();
    std::uint64_t rows = 0;
    std::uint64_t filters = 0;
    for (const QFiltersState& state : cache.states()) {  // evicts
      rows += (state.keys.size() + state.values.size()) * 2;
      filters += state.filter_dir.size() * sizeof(float);
      RC_ASSERT(state.positions.size() == cache.tokens_kept());
    }
    const std::uint64_t seen = data.groups() * cache.offset();
    const std::uint64_t full = seen * (data.dim + data.value_dim) * 2;
    RC_ASSERT(cache.nbytes() == rows);
    RC_ASSERT(before == rows + filters);
    RC_ASSERT(cache.qfilters_kept_bytes() == rows + filters);
    RC_ASSERT(cache.full_seq_bytes() == full);
    RC_ASSERT(cache.tokens_seen() == seen);
    RC_ASSERT(
        cache.compression_ratio() ==
        (rows + filters == 0 ? 1.0
                             : static_cast<double>(full) /
                                   static_cast<double>(rows + filters)));
  }
}

}  // namespace
}  // namespace qfilters
