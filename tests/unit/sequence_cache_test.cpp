#include "qfilters/sequence_cache.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"

#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using test::budget;
using test::contents_of;
using test::error_of;
using test::expect_recounted_stats;
using test::expect_true_rows;
using test::IsError;
using test::kModelTokens;
using test::Model;
using test::qfilters_policy;
using test::two_layers;

TEST(SequenceCacheTest, StartsEmpty) {
  const Model& model = two_layers();
  const SequenceCache cache(model.layers, Policy::full(), model.options());
  EXPECT_EQ(cache.layers(), 2U);
  EXPECT_EQ(cache.layer_shape(1), model.layers[1]);
  EXPECT_EQ(cache.offset(), 0U);
  EXPECT_FALSE(cache.open());
  EXPECT_EQ(cache.policy().name(), "full");
  EXPECT_EQ(cache.options().batch, 2U);
  expect_recounted_stats(cache, 0, 0);
}

TEST(SequenceCacheTest, KeepsEveryRowUnderTheFullPolicy) {
  const Model& model = two_layers();
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.feed(cache, {100, 1, 0, 64, 135});
  EXPECT_EQ(cache.offset(), kModelTokens);
  EXPECT_EQ(cache.stats().rows_min, kModelTokens);
  expect_true_rows(cache, model);
  expect_recounted_stats(cache, 0, 0);
}

TEST(SequenceCacheTest, ShowsNewRowsOnceTheyAreAppended) {
  const Model& model = two_layers();
  SequenceCache cache(
      model.layers, qfilters_policy(model, budget(8, 1, 2)), model.options());
  model.feed(cache, {20});
  cache.begin(30);
  EXPECT_EQ(cache.rows(0).new_rows(), 0U);
  EXPECT_EQ(cache.rows(0).rows(3), 8U);
  cache.append(0, model.keys[0].slice(20, 30), model.values[0].slice(20, 30));
  const RowsView rows = cache.rows(0);
  EXPECT_EQ(rows.new_rows(), 30U);
  EXPECT_EQ(rows.rows(3), 38U);
  EXPECT_EQ(rows.first_position(), 20);
  EXPECT_EQ(rows.position(3, 37), 49);
  // Borrowed, not copied.
  EXPECT_EQ(rows.new_keys().data, model.keys[0].slice(20, 30).data);
  EXPECT_EQ(cache.rows(1).new_rows(), 0U);
  EXPECT_EQ(cache.offset(), 20U);
}

TEST(SequenceCacheTest, ForgetsARolledBackMicroBatch) {
  const Model& model = two_layers();
  const Policy policy = qfilters_policy(model, budget(20, 1, 4));
  SequenceCache cache(model.layers, policy, model.options());
  SequenceCache never(model.layers, policy, model.options());
  for (const std::size_t count : {10U, 30U, 1U, 64U}) {
    const auto before = contents_of(cache);
    model.append(cache, 50);
    cache.rollback();
    EXPECT_FALSE(cache.open());
    EXPECT_EQ(contents_of(cache), before);
    // Half-open ones too.
    cache.begin(7);
    cache.append(1, model.keys[1].slice(0, 7), model.values[1].slice(0, 7));
    cache.rollback();
    EXPECT_EQ(contents_of(cache), before);
    model.feed(cache, {count});
    model.feed(never, {count});
  }
  EXPECT_EQ(contents_of(cache), contents_of(never));
  EXPECT_EQ(cache.stats().evictions, never.stats().evictions);
  EXPECT_EQ(cache.stats().rows_evicted, never.stats().rows_evicted);
  EXPECT_EQ(cache.stats().kv_bytes_full, never.stats().kv_bytes_full);
  EXPECT_EQ(cache.stats().kv_bytes_peak, never.stats().kv_bytes_peak);
}

TEST(SequenceCacheTest, RollsBackNothingWithoutComplaint) {
  const Model& model = two_layers();
  SequenceCache cache(model.layers, Policy::full(), model.options());
  cache.rollback();
  EXPECT_FALSE(cache.open());
}

TEST(SequenceCacheTest, StaysOpenAndUnchangedWhenACommitExceedsTheLimit) {
  const Model& model = two_layers();
  // One block for every head of the first layer, and for half of the second.
  SequenceCache unlimited(model.layers, Policy::full(), model.options());
  model.feed(unlimited, {10});
  const std::size_t all = unlimited.stats().kv_bytes;
  const std::size_t first = unlimited.store(0).bytes();
  SequenceOptions options = model.options();
  options.byte_limit = all + first + (all - first) / 2;
  SequenceCache cache(model.layers, Policy::full(), options);
  model.feed(cache, {10});
  const auto before = contents_of(cache);
  const SequenceStats stats = cache.stats();
  model.append(cache, 60);
  for (int attempt = 0; attempt < 3; ++attempt) {
    EXPECT_THAT(
        error_of([&] { cache.commit(); }),
        IsError(ErrorKind::kMemoryLimit, "limit"));
    EXPECT_TRUE(cache.open());
    EXPECT_EQ(contents_of(cache), before);
    EXPECT_EQ(cache.rows(1).new_rows(), 60U);
    EXPECT_EQ(cache.stats().kv_bytes, stats.kv_bytes);
    EXPECT_EQ(cache.stats().kv_bytes_full, stats.kv_bytes_full);
  }
  cache.rollback();
  model.feed(cache, {54});  // fills the blocks it has
  model.feed(unlimited, {54});
  EXPECT_EQ(contents_of(cache), contents_of(unlimited));
}

TEST(SequenceCacheTest, NeedsNoMoreMemoryThanTheBudget) {
  const Model& model = two_layers();
  SequenceOptions options = model.options();
  for (const LayerShape& l : model.layers) {
    options.byte_limit +=
        model.batch * l.kv_heads * kBlockRows * (l.key_dim + l.value_dim) * 2;
  }
  SequenceCache cache(
      model.layers, qfilters_policy(model, budget(64, 4, 8)), options);
  model.feed(cache, {200, 1, 1, 98});
  EXPECT_EQ(cache.stats().kv_bytes, options.byte_limit);
  EXPECT_EQ(cache.stats().kv_bytes_peak, options.byte_limit);
}

TEST(SequenceCacheTest, ClearsToTheStateOfANewCache) {
  const Model& model = two_layers();
  const Policy policy = qfilters_policy(model, budget(20, 1, 4));
  SequenceCache cache(model.layers, policy, model.options());
  model.feed(cache, {100, 3});
  model.append(cache, 5);
  cache.clear();
  EXPECT_FALSE(cache.open());
  EXPECT_EQ(cache.policy().name(), "qfilters");
  EXPECT_EQ(cache.stats().kv_bytes_peak, 0U);
  expect_recounted_stats(cache, 0, 0);
  SequenceCache fresh(model.layers, policy, model.options());
  EXPECT_EQ(contents_of(cache), contents_of(fresh));
  model.feed(cache, {77, 100});
  model.feed(fresh, {77, 100});
  EXPECT_EQ(contents_of(cache), contents_of(fresh));
  EXPECT_EQ(cache.stats().kv_bytes_peak, fresh.stats().kv_bytes_peak);
}

TEST(SequenceCacheTest, ScoresStoredRowsAgainUnderANewPolicy) {
  const Model& model = two_layers();
  const Policy next = qfilters_policy(model, budget(30, 2, 6));
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.feed(cache, {50, 3, 40});
  cache.set_policy(next);
  EXPECT_EQ(cache.policy().name(), "qfilters");
  EXPECT_EQ(cache.stats().rows_min, 93U);  // nothing is evicted yet
  SequenceCache always(
      model.layers,
      qfilters_policy(model, budget(30, 2, 6, 63)),
      model.options());
  model.feed(always, {92});
  always.set_policy(next);
  model.feed(always, {1});
  model.feed(cache, {0});
  EXPECT_EQ(contents_of(cache), contents_of(always));
  // Gaps between stored positions do not matter to position-based scorers.
  const Policy random = Policy::make("random", budget(25, 2, 6));
  cache.set_policy(random);
  for (std::size_t g = 0; g < 4; ++g) {
    const auto positions = cache.store(0).positions(g);
    std::vector<float> all(kModelTokens);
    random.scorer()->score({0, g / 2, g % 2, model.keys[0].view(), 0}, all);
    for (std::size_t r = 0; r < positions.size(); ++r) {
      EXPECT_EQ(
          cache.store(0).scores(g)[r],
          all[static_cast<std::size_t>(positions[r])]);
    }
  }
}

TEST(SequenceCacheTest, RefusesAPolicyWhileOpenOrForAnotherModel) {
  const Model& model = two_layers();
  const Model other({{2, 16, 16, 0}, {2, 16, 16, 0}});
  SequenceCache cache(
      model.layers, qfilters_policy(model, budget(8, 1, 1)), model.options());
  model.feed(cache, {20});
  const auto before = contents_of(cache);
  EXPECT_THAT(
      error_of([&] { cache.set_policy(qfilters_policy(other, {})); }),
      IsError(ErrorKind::kMismatch, "[2, 16]"));
  cache.begin(1);
  EXPECT_THAT(
      error_of([&] { cache.set_policy(Policy::full()); }),
      IsError(ErrorKind::kInvalidArgument, "set_policy: "));
  cache.rollback();
  EXPECT_EQ(contents_of(cache), before);
  EXPECT_EQ(cache.policy().options().budget, 8U);
}

TEST(SequenceCacheTest, RejectsLayersThatCannotBe) {
  const auto make = [](std::vector<LayerShape> layers,
                       SequenceOptions options = {}) {
    return error_of([&] {
      const SequenceCache cache(std::move(layers), Policy::full(), options);
    });
  };
  const auto invalid = IsError(ErrorKind::kInvalidArgument, "");
  EXPECT_EQ(make({{1, 1, 1, 0}}), std::nullopt);
  EXPECT_THAT(make({}), invalid);
  EXPECT_THAT(make({{0, 1, 1, 0}}), invalid);
  EXPECT_THAT(make({{1, 0, 1, 0}}), invalid);
  EXPECT_THAT(make({{1, 1, 0, 5}}), invalid);
  SequenceOptions options;
  options.batch = 0;
  EXPECT_THAT(make({{1, 1, 1, 0}}, options), invalid);
  options = {};
  options.threads = 0;
  EXPECT_THAT(make({{1, 1, 1, 0}}, options), invalid);
  options = {};
  options.dtype = DType::kFloat32;
  EXPECT_THAT(make({{1, 1, 1, 0}}, options), invalid);
}

TEST(SequenceCacheTest, RefusesAScorerOfAnotherModel) {
  const Model& model = two_layers();
  const auto make = [&](std::vector<LayerShape> layers) {
    return error_of([&] {
      const SequenceCache cache(
          std::move(layers), qfilters_policy(model, {}), model.options());
    });
  };
  EXPECT_THAT(
      make({{2, 24, 24, 0}, {3, 16, 8, 0}}),
      IsError(ErrorKind::kMismatch, "layer 1"));
  EXPECT_THAT(
      make({{4, 24, 24, 0}, {3, 17, 8, 0}}),
      IsError(ErrorKind::kMismatch, "layer 0"));
  EXPECT_THAT(
      make({{2, 24, 24, 0}, {3, 17, 8, 0}, {3, 17, 8, 0}}),
      IsError(ErrorKind::kMismatch, "layer 2"));
  // A windowed layer is never scored.
  EXPECT_EQ(make({{2, 24, 24, 0}, {3, 16, 8, 64}}), std::nullopt);
}

TEST(SequenceCacheTest, RejectsCallsOutOfOrder) {
  const Model& model = two_layers();
  SequenceCache cache(model.layers, Policy::full(), model.options());
  const TensorView keys = model.keys[0].slice(0, 5);
  const TensorView values = model.values[0].slice(0, 5);
  const auto invalid = [](const char* part) {
    return IsError(ErrorKind::kInvalidArgument, part);
  };
  EXPECT_THAT(
      error_of([&] { cache.append(0, keys, values); }),
      invalid("no micro-batch is open"));
  EXPECT_THAT(
      error_of([&] { cache.commit(); }), invalid("no micro-batch is open"));
  cache.begin(5);
  EXPECT_THAT(error_of([&] { cache.begin(5); }), invalid("begin: "));
  cache.append(0, keys, values);
  EXPECT_THAT(
      error_of([&] { cache.append(0, keys, values); }),
      invalid("layer 0 has its rows already"));
  EXPECT_THAT(
      error_of([&] { cache.commit(); }), invalid("layer 1 has no new rows"));
  EXPECT_TRUE(cache.open());
  EXPECT_THAT(
      error_of([&] { cache.append(2, keys, values); }),
      invalid("layer 2 of 2"));
  EXPECT_THAT(
      error_of([&] { static_cast<void>(cache.rows(2)); }), invalid("2 of 2"));
  EXPECT_THAT(
      error_of([&] { static_cast<void>(cache.store(2)); }), invalid("2 of 2"));
  cache.append(1, model.keys[1].slice(0, 5), model.values[1].slice(0, 5));
  cache.commit();
  EXPECT_EQ(cache.offset(), 5U);
}

TEST(SequenceCacheTest, RejectsPositionsBeyondInt32) {
  const Model& model = two_layers();
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.feed(cache, {10});
  constexpr std::size_t kMax = std::numeric_limits<std::int32_t>::max();
  for (const std::size_t tokens :
       {kMax - 9, kMax, std::numeric_limits<std::size_t>::max()}) {
    EXPECT_THAT(
        error_of([&] { cache.begin(tokens); }),
        IsError(ErrorKind::kInvalidArgument, "int32"));
    EXPECT_FALSE(cache.open());
  }
  cache.begin(kMax - 10);
  cache.rollback();
}

TEST(SequenceCacheTest, RejectsRowsThatDoNotFitAndKeepsTheMicroBatchOpen) {
  const Model& model = two_layers();
  SequenceCache cache(model.layers, Policy::full(), model.options());
  cache.begin(5);
  const auto with =
      [&](const std::function<void(TensorView&, TensorView&)>& change) {
        TensorView keys = model.keys[0].slice(0, 5);
        TensorView values = model.values[0].slice(0, 5);
        change(keys, values);
        return error_of([&] { cache.append(0, keys, values); });
      };
  const auto is_shape = IsError(
      ErrorKind::kShape,
      "do not fit layer 0 with batch=2 kv_heads=2 key_dim=24 value_dim=24 "
      "tokens=5 dtype=float16");
  using V = TensorView;
  for (std::size_t V::*member : {&V::batch, &V::heads, &V::tokens, &V::dim}) {
    EXPECT_THAT(with([&](V& k, V&) { ++(k.*member); }), is_shape);
    EXPECT_THAT(with([&](V&, V& v) { ++(v.*member); }), is_shape);
    EXPECT_THAT(
        with([&](V& k, V& v) { ++(k.*member), ++(v.*member); }), is_shape);
  }
  EXPECT_THAT(with([](V& k, V&) { k.dtype = DType::kBFloat16; }), is_shape);
  EXPECT_THAT(with([](V&, V& v) { v.dtype = DType::kFloat32; }), is_shape);
  EXPECT_EQ(cache.rows(0).new_rows(), 0U);
  EXPECT_EQ(with([](V&, V&) {}), std::nullopt);
}

}  // namespace
}  // namespace qfilters
