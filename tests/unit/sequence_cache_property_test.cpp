// What holds of a SequenceCache for any rows, layers, policies and
// micro-batches.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "qfilters/merging.h"
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
  std::vector<LayerFilters> of_auto;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    fill_with_any_kind(model.keys[l]);
    fill_with_any_kind(model.values[l]);
    filters.push_back(
        {layers[l].kv_heads,
         layers[l].key_dim,
         any_filter(layers[l].kv_heads * layers[l].key_dim)});
    const std::size_t size = auto_size(layers[l].key_dim);
    of_auto.push_back(
        {layers[l].kv_heads, size, any_filter(layers[l].kv_heads * size)});
  }
  model.filters = std::make_shared<const FilterBank>(filters, FilterMetadata{});
  model.of_auto = std::make_shared<const FilterBank>(of_auto, FilterMetadata{});
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

/// One whose scores do not depend on what else is held when rows go.
Policy any_frozen_policy(const Model& model) {
  const std::string_view name = *rc::gen::element<std::string_view>(
      "qfilters", "streaming", "knorm", "random");
  return Policy::make(name, options_of(any_bounds(0)), model.filters_for(name));
}

/// Of a row that goes something to three that stay, and to the very first.
class AnyMerger final : public Merger {
 public:
  [[nodiscard]] std::string_view name() const noexcept override {
    return "any";
  }

  [[nodiscard]] std::string identity() const override { return "any"; }

  void merge(const MergeInput& in, std::vector<Merge>& out) const override {
    RC_ASSERT(in.scores.size() == in.positions.size());
    RC_ASSERT(in.kept.size() < in.positions.size());
    RC_ASSERT(std::is_sorted(in.positions.begin(), in.positions.end()));
    for (std::uint32_t row = 0; row < in.positions.size(); ++row) {
      const auto next = std::ranges::lower_bound(in.kept, row);
      if (next != in.kept.end() && *next == row) continue;
      const auto first = static_cast<std::uint32_t>(next - in.kept.begin());
      const auto behind = static_cast<std::uint32_t>(in.kept.size()) - first;
      const float score = in.scores[row];
      const float weight =
          std::isfinite(score) ? std::clamp(score / 256, -1.0F, 1.0F) : 0.5F;
      out.push_back({row, first, std::min(3U, behind), weight});
      if (!in.kept.empty() && in.positions[row] % 2 == 0)
        out.push_back({row, 0, 1, 0.125F});
    }
  }
};

/// The same policy, with a merger or without.
Policy merging(const Policy& policy, std::shared_ptr<const Merger> merger) {
  if (!policy.bounded()) return policy;
  PolicyOptions options = policy.options();
  options.merger = std::move(merger);
  return Policy::custom(policy.scorer(), options);
}

/// With a merger or without, evicting at once or now and then.
Policy any_merging_policy(const Model& model) {
  const Policy policy = any_policy(model, any_of(0, 1) * 90);
  const bool merges = any_of(0, 1) == 1;
  return merging(policy, merges ? std::make_shared<AnyMerger>() : nullptr);
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
  const Policy policy = any_frozen_policy(model);
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
  const Policy policy =
      any_of(0, 4) == 0 ? Policy::full() : any_frozen_policy(model);
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
  const Policy policy = any_merging_policy(model);
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
  const Policy policy = any_merging_policy(model);
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
  const Policy policy = any_merging_policy(model);
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

// The values of one head as a merger leaves them, by position.
class SlowValues {
 public:
  explicit SlowValues(const RowShape& shape) : shape_(shape) {
    shape_.batch = shape_.kv_heads = 1;
  }

  void enter(std::int32_t position, std::span<const std::uint16_t> value) {
    values_[position].assign(value.begin(), value.end());
    written_.push_back(position);
  }

  /// All but `kept` go, and are merged or not. `scores` are of all positions.
  void evict(
      const std::vector<std::int32_t>& kept,
      std::span<const float> scores,
      bool merges) {
    if (merges && kept.size() < values_.size()) merge(kept, scores);
    std::erase_if(values_, [&](const auto& row) {
      return !std::ranges::binary_search(kept, row.first);
    });
    for (const std::int32_t position : written_) {
      if (values_.contains(position)) store(values_[position]);
    }
    written_.clear();
  }

  [[nodiscard]] const std::vector<std::uint16_t>& at(
      std::int32_t position) const {
    return values_.at(position);
  }

 private:
  void merge(
      const std::vector<std::int32_t>& kept, std::span<const float> scores) {
    std::vector<std::int32_t> positions;
    std::vector<float> held;
    std::vector<std::uint32_t> rows;
    for (const auto& [position, value] : values_) {
      if (std::ranges::binary_search(kept, position))
        rows.push_back(static_cast<std::uint32_t>(positions.size()));
      positions.push_back(position);
      held.push_back(scores[static_cast<std::size_t>(position)]);
    }
    std::vector<Merge> merges;
    AnyMerger().merge({0, 0, 0, positions, held, rows}, merges);
    std::map<std::int32_t, std::vector<float>> sums;
    for (const Merge& merge : merges) {
      const auto& value = values_[positions[merge.evicted]];
      for (std::uint32_t k = 0; k < merge.count; ++k) {
        auto& sum = sums[kept[merge.first + k]];
        sum.resize(shape_.value_dim);
        for (std::size_t d = 0; d < sum.size(); ++d)
          sum[d] += merge.weight * decoded(value[d]);
      }
    }
    for (const auto& [position, sum] : sums)
      add(position, sum);
  }

  // Nothing to add, or a number that the type does not hold, changes nothing.
  void add(std::int32_t position, const std::vector<float>& sum) {
    std::vector<std::uint16_t> moved = values_[position];
    bool changes = false;
    for (std::size_t d = 0; d < moved.size(); ++d) {
      changes = changes || sum[d] != 0;
      moved[d] = test::encode(shape_.dtype, decoded(moved[d]) + sum[d]);
      if (!std::isfinite(decoded(moved[d]))) return;
    }
    if (!changes) return;
    values_[position] = moved;
    written_.push_back(position);
  }

  [[nodiscard]] float decoded(std::uint16_t bits) const {
    return static_cast<float>(test::decode(shape_.dtype, bits));
  }

  // What a store makes of it.
  void store(std::vector<std::uint16_t>& value) const {
    RowPool pool(0);
    KVStore store(pool, shape_);
    store.reserve(0, 1);
    const std::vector<std::uint16_t> key(shape_.key_dim);
    store.append_row(0, key.data(), value.data(), 0, 0);
    store.read_value(0, 0, value.data());
  }

  RowShape shape_;
  std::map<std::int32_t, std::vector<std::uint16_t>> values_;
  std::vector<std::int32_t> written_;
};

/// Scores of every head's rows, by position.
using Scores = std::vector<std::vector<std::vector<float>>>;

/// Takes those of stored rows over.
void update(Scores& scores, const SequenceCache& cache) {
  scores.resize(cache.layers());
  for (std::size_t l = 0; l < cache.layers(); ++l) {
    const KVStore& store = cache.store(l);
    scores[l].resize(store.shape().groups());
    for (std::size_t g = 0; g < scores[l].size(); ++g) {
      scores[l][g].resize(test::kModelTokens);
      for (std::size_t r = 0; r < store.rows(g); ++r) {
        const auto position = static_cast<std::size_t>(store.positions(g)[r]);
        scores[l][g][position] = store.scores(g)[r];
      }
    }
  }
}

/// A head has `values`, else what `want` has.
void assert_rows(
    const LayerShape& shape,
    const Contents::Group& got,
    const Contents::Group& want,
    const SlowValues& values) {
  RC_ASSERT(got.positions == want.positions);
  RC_ASSERT(got.scores == want.scores);
  const std::size_t width = shape.key_dim + shape.value_dim;
  for (std::size_t r = 0; r < got.positions.size(); ++r) {
    const auto row = std::span(got.rows).subspan(r * width, width);
    const auto key = std::span(want.rows).subspan(r * width, shape.key_dim);
    RC_ASSERT(std::ranges::equal(row.first(shape.key_dim), key));
    RC_ASSERT(std::ranges::equal(
        row.last(shape.value_dim), values.at(got.positions[r])));
  }
}

// A policy merges from some micro-batch on, in either order of rows.
RC_GTEST_PROP(SequenceCachePropertyTest, MergesAsASlowComputationDoes, ()) {
  const Model model = any_model();
  PolicyOptions options = options_of(any_bounds(any_of(0, 1) * 90));
  if (any_of(0, 1) == 1) {
    options.block = any_of(1, 9);
    options.rule =
        *rc::gen::element(BudgetRule::kPerLayer, BudgetRule::kShared);
  }
  const std::string_view name = any_name();
  const Policy plain = Policy::make(name, options, model.filters_for(name));
  RC_PRE(plain.bounded());
  const SequenceOptions how = in_any_order(model);
  SequenceCache cache(model.layers, plain, how);
  SequenceCache wanted(model.layers, plain, how);  // but for values
  auto batches = any_split(any_of(0, 150));
  batches.insert(batches.begin(), any_of(0, 100), 1);
  const std::size_t at = any_of(0, batches.size());
  batches.insert(batches.begin() + static_cast<std::ptrdiff_t>(at), 40);
  Bounds all;
  all.budget = test::kModelTokens;
  SequenceCache everything(
      model.layers,
      Policy::make(name, options_of(all), model.filters_for(name)),
      model.options());
  model.feed(everything, {test::kModelTokens});
  Scores scores;
  update(scores, everything);
  std::vector<std::vector<SlowValues>> slow(model.layers.size());
  for (std::size_t l = 0; l < slow.size(); ++l) {
    const RowShape& shape = cache.store(l).shape();
    slow[l].assign(shape.groups(), SlowValues(shape));
  }
  for (std::size_t i = 0; i < batches.size(); ++i) {
    if (i == at) {
      cache.set_policy(merging(plain, std::make_shared<AnyMerger>()));
      wanted.set_policy(plain);
      update(scores, wanted);
    }
    const std::size_t begin = cache.offset();
    model.feed(cache, {batches[i]});
    model.feed(wanted, {batches[i]});
    const Contents got = in_temporal_order(cache);
    const Contents want = in_temporal_order(wanted);
    for (std::size_t l = 0; l < slow.size(); ++l) {
      const LayerShape& shape = model.layers[l];
      if (shape.window != 0) RC_ASSERT(got.layers[l] == want.layers[l]);
      for (std::size_t g = 0; shape.window == 0 && g < slow[l].size(); ++g) {
        for (std::size_t t = begin; t < cache.offset(); ++t) {
          slow[l][g].enter(
              static_cast<std::int32_t>(t),
              model.values[l].row(g / shape.kv_heads, g % shape.kv_heads, t));
        }
        slow[l][g].evict(want.layers[l][g].positions, scores[l][g], i >= at);
        assert_rows(shape, got.layers[l][g], want.layers[l][g], slow[l][g]);
      }
    }
  }
}

}  // namespace
}  // namespace qfilters
