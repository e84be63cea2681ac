// What holds of a SequenceCache for any rows, layers, policies and
// micro-batches.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "qfilters/sequence_cache.h"

#include "unit/generators.h"
#include "unit/sequence_fixture.h"

namespace qfilters {
namespace {

using test::any_bounds;
using test::any_filter;
using test::any_of;
using test::any_split;
using test::assert_best_rows;
using test::Bounds;
using test::Contents;
using test::contents_of;
using test::in_temporal_order;
using test::Model;

/// One to three layers, some of them windowed, with rows of either format.
Model any_model() {
  std::vector<LayerShape> layers(any_of(1, 3));
  for (LayerShape& layer : layers) {
    layer = {any_of(1, 3), any_of(1, 20), any_of(1, 6), 0};
    if (any_of(0, 2) == 0) layer.window = any_of(1, 140);
  }
  Model model(
      layers,
      any_of(1, 2),
      *rc::gen::element(DType::kFloat16, DType::kBFloat16));
  model.format = *rc::gen::element(RowFormat::kSame, RowFormat::kInt8);
  std::vector<LayerFilters> filters;
  std::vector<LayerFilters> quadratics;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    fill_with_any_kind(model.keys[l]);
    fill_with_any_kind(model.values[l]);
    filters.push_back(
        {layers[l].kv_heads,
         layers[l].key_dim,
         any_filter(layers[l].kv_heads * layers[l].key_dim)});
    const std::size_t size = quadratic_size(layers[l].key_dim);
    quadratics.push_back(
        {layers[l].kv_heads, size, any_filter(layers[l].kv_heads * size)});
  }
  model.filters = std::make_shared<const FilterBank>(filters, FilterMetadata{});
  model.quadratics =
      std::make_shared<const FilterBank>(quadratics, FilterMetadata{});
  return model;
}

PolicyOptions options_of(const Bounds& bounds) {
  PolicyOptions out;
  out.budget = bounds.budget;
  out.protection = bounds.protection;
  out.interval = bounds.interval;
  out.seed = 7;
  return out;
}

SequenceOptions in_any_order(const Model& model) {
  SequenceOptions out = model.options();
  out.order = *rc::gen::element(RowOrder::kTemporal, RowOrder::kSlot);
  return out;
}

std::string_view any_name() {
  const auto names = Policy::names();
  return names[any_of(0, names.size() - 1)];
}

Policy any_policy(const Model& model, std::size_t most_interval) {
  const std::string_view name = any_name();
  return Policy::make(
      name, options_of(any_bounds(most_interval)), model.filters_for(name));
}

/// Counters that do not depend on how the tokens came.
void assert_same_totals(const SequenceCache& a, const SequenceCache& b) {
  const SequenceStats x = a.stats();
  const SequenceStats y = b.stats();
  RC_ASSERT(x.tokens == y.tokens);
  RC_ASSERT(x.rows_min == y.rows_min);
  RC_ASSERT(x.rows_max == y.rows_max);
  RC_ASSERT(x.rows_mean == y.rows_mean);
  RC_ASSERT(x.kv_bytes == y.kv_bytes);
  RC_ASSERT(x.kv_bytes_full == y.kv_bytes_full);
  RC_ASSERT(x.rows_evicted == y.rows_evicted);
  RC_ASSERT(x.non_finite_scores == y.non_finite_scores);
}

RC_GTEST_PROP(SequenceCachePropertyTest, KeepsTheBestRowsOfAllItHasSeen, ()) {
  const Model model = any_model();
  const Policy policy = any_policy(model, 0);
  RC_PRE(policy.bounded());
  const std::size_t tokens = any_of(0, test::kModelTokens);
  SequenceCache cache(model.layers, policy, in_any_order(model));
  model.feed(cache, any_split(tokens));
  // The same scorer over a cache that keeps every row.
  Bounds all;
  all.budget = test::kModelTokens;
  const SequenceStats stats = cache.stats();
  SequenceCache everything(
      model.layers,
      Policy::make(
          policy.name(), options_of(all), model.filters_for(policy.name())),
      model.options());
  model.feed(everything, {tokens});
  for (std::size_t l = 0; l < cache.layers(); ++l) {
    if (model.layers[l].window != 0) continue;
    for (std::size_t g = 0; g < cache.store(l).shape().groups(); ++g) {
      auto kept = contents_of(cache).layers[l][g].positions;
      std::sort(kept.begin(), kept.end());
      const auto scores = everything.store(l).scores(g);
      RC_ASSERT(kept.size() == std::min(tokens, policy.options().budget));
      RC_ASSERT(kept.size() <= stats.rows_max);
      assert_best_rows(
          kept, {scores.begin(), scores.end()}, policy.options().protection);
    }
  }
}

RC_GTEST_PROP(
    SequenceCachePropertyTest, KeepsTheSameHoweverTheTokensAreSplit, ()) {
  const Model model = any_model();
  const Policy policy = any_policy(model, 0);
  const std::size_t tokens = any_of(0, test::kModelTokens);
  SequenceCache whole(model.layers, policy, model.options());
  model.feed(whole, {tokens});
  SequenceCache split(model.layers, policy, model.options());
  model.feed(split, any_split(tokens));
  RC_ASSERT(contents_of(whole) == contents_of(split));
  assert_same_totals(whole, split);
}

RC_GTEST_PROP(SequenceCachePropertyTest, KeepsTheSameInEitherOrder, ()) {
  const Model model = any_model();
  const Policy policy = any_policy(model, any_of(0, 1) * 90);
  SequenceOptions slot = model.options();
  slot.order = RowOrder::kSlot;
  SequenceCache temporal_cache(model.layers, policy, model.options());
  SequenceCache slot_cache(model.layers, policy, slot);
  const std::size_t tokens = any_of(0, test::kModelTokens);
  auto batches = any_split(tokens);
  // Then one by one, where slots are overwritten, and a batch again.
  batches.insert(batches.end(), test::kModelTokens - tokens, 1);
  for (const std::size_t count : batches) {
    model.feed(temporal_cache, {count});
    model.feed(slot_cache, {count});
  }
  RC_ASSERT(contents_of(temporal_cache) == in_temporal_order(slot_cache));
  assert_same_totals(temporal_cache, slot_cache);
  RC_ASSERT(temporal_cache.stats().evictions == slot_cache.stats().evictions);
}

RC_GTEST_PROP(
    SequenceCachePropertyTest, GoesOnFromASnapshotAsIfFromItself, ()) {
  const Model model = any_model();
  const Policy policy = any_policy(model, any_of(0, 1) * 90);
  const SequenceOptions options = in_any_order(model);
  SequenceCache straight(model.layers, policy, options);
  SequenceCache resumed(model.layers, policy, options);
  const auto batches = any_split(any_of(0, test::kModelTokens));
  const std::size_t at = any_of(0, batches.size());
  for (std::size_t i = 0; i <= batches.size(); ++i) {
    if (i == at) resumed.restore(straight.save());
    if (i < batches.size()) model.feed(straight, {batches[i]});
    if (i < batches.size() && i >= at) model.feed(resumed, {batches[i]});
    if (i < at) continue;
    RC_ASSERT(contents_of(straight) == contents_of(resumed));
    assert_same_totals(straight, resumed);
    RC_ASSERT(straight.stats().evictions == resumed.stats().evictions);
  }
  RC_ASSERT(straight.save() == resumed.save());
}

RC_GTEST_PROP(SequenceCachePropertyTest, CountsWhatARecountGives, ()) {
  const Model model = any_model();
  const Policy policy = any_policy(model, any_of(0, 1) * 90);
  SequenceCache cache(model.layers, policy, in_any_order(model));
  std::uint64_t evictions = 0;
  std::uint64_t evicted = 0;
  std::size_t peak = 0;
  for (const std::size_t count : any_split(any_of(0, test::kModelTokens))) {
    std::uint64_t gone = 0;
    model.append(cache, count);
    const Contents before = contents_of(cache);
    cache.commit();
    for (std::size_t l = 0; l < cache.layers(); ++l) {
      if (model.layers[l].window != 0) continue;
      for (std::size_t g = 0; g < before.layers[l].size(); ++g) {
        gone += before.layers[l][g].positions.size() + count -
                cache.store(l).rows(g);
      }
    }
    evicted += gone;
    evictions += gone > 0 ? 1 : 0;
    const SequenceStats stats = cache.stats();
    const SequenceStats want = test::recounted_stats(cache);
    peak = std::max(peak, want.kv_bytes);
    RC_ASSERT(stats.tokens == want.tokens);
    RC_ASSERT(stats.rows_min == want.rows_min);
    RC_ASSERT(stats.rows_max == want.rows_max);
    RC_ASSERT(stats.rows_mean == want.rows_mean);
    RC_ASSERT(stats.kv_bytes == want.kv_bytes);
    RC_ASSERT(stats.kv_bytes_peak >= peak);
    RC_ASSERT(stats.kv_bytes_full == want.kv_bytes_full);
    RC_ASSERT(stats.evictions == evictions);
    RC_ASSERT(stats.rows_evicted == evicted);
  }
}

}  // namespace
}  // namespace qfilters
