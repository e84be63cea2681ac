#include "qfilters/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"

#include "unit/kv_cache_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using test::bits_of;
using test::chunks;
using test::config_of;
using test::encode;
using test::error_of;
using test::HalfTensor;
using test::IsError;
using test::LayerData;
using test::ReferenceHead;

TEST(QFiltersKVCacheTest, StartsEmpty) {
  const LayerData data;
  QFiltersKVCache cache(Config(), data.filters);
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(cache.offset(), 0U);
  EXPECT_EQ(cache.size(), 0U);
  EXPECT_EQ(cache.tokens_seen(), 0U);
  EXPECT_EQ(cache.tokens_kept(), 0U);
  EXPECT_EQ(cache.full_seq_bytes(), 0U);
  EXPECT_EQ(cache.qfilters_kept_bytes(), 0U);
  EXPECT_EQ(cache.nbytes(), 0U);
  EXPECT_EQ(cache.compression_ratio(), 1.0);
  EXPECT_EQ(cache.non_finite_scores(), 0U);
  EXPECT_THAT(cache.states(), IsEmpty());
  EXPECT_EQ(cache.config().qfilters_budget, 512);
}

TEST(QFiltersKVCacheTest, ReturnsTheFirstRowsAsTheyAre) {
  const LayerData data;
  QFiltersKVCache cache(config_of(64, 4), data.filters);
  const RowsView rows = data.feed(cache, 10);
  for (std::size_t g = 0; g < data.groups(); ++g) {
    ASSERT_EQ(rows.rows(g), 10U);
    for (std::size_t t = 0; t < 10; ++t) {
      EXPECT_TRUE(data.is_token(rows, g, t, t));
    }
  }
}

// One way to evict and to split the tokens.
struct Eviction {
  Config config;
  std::size_t chunk;
};

std::vector<Eviction> evictions() {
  std::vector<Eviction> out;
  Config inverted = config_of(24, 2, 6);
  inverted.qfilters_sign = -1;
  for (const std::size_t chunk : {1U, 7U, 50U, 120U}) {
    out.push_back({config_of(16, 4), chunk});
    out.push_back({config_of(70, 4, 8), chunk});
    out.push_back({config_of(20, 0, 8, 5), chunk});
    out.push_back({config_of(1, 0), chunk});
    out.push_back({inverted, chunk});
  }
  return out;
}

TEST(QFiltersKVCacheTest, ReturnsPriorKeptRowsThenAllNewRowsAndEvictsAfter) {
  const LayerData data;
  for (const auto& [config, chunk] : evictions()) {
    SCOPED_TRACE(
        "budget " + std::to_string(config.qfilters_budget) + " chunk " +
        std::to_string(chunk));
    QFiltersKVCache cache(config, data.filters);
    std::vector<ReferenceHead> want(data.groups());
    for (const std::size_t count : chunks(120, chunk)) {
      const std::size_t first = cache.offset();
      const RowsView rows = data.feed(cache, count);
      EXPECT_EQ(rows.new_rows(), count);
      for (std::size_t g = 0; g < data.groups(); ++g) {
        for (std::size_t t = first; t < first + count; ++t) {
          want[g].add(
              static_cast<std::int32_t>(t),
              data.score(g, t, static_cast<float>(config.qfilters_sign)));
        }
        ASSERT_EQ(rows.rows(g), want[g].positions.size());
        for (std::size_t r = 0; r < rows.rows(g); ++r) {
          ASSERT_TRUE(data.is_token(
              rows, g, r, static_cast<std::size_t>(want[g].positions[r])));
        }
        want[g].evict(
            static_cast<std::size_t>(config.qfilters_budget),
            {static_cast<std::size_t>(config.qfilters_n_sink),
             static_cast<std::size_t>(config.qfilters_recent)},
            static_cast<std::size_t>(config.qfilters_interval));
      }
      EXPECT_EQ(cache.tokens_kept(), want[0].positions.size());
    }
    for (std::size_t g = 0; g < data.groups(); ++g) {
      EXPECT_EQ(cache.positions(g), want[g].positions);
      EXPECT_EQ(bits_of(cache.scores(g)), bits_of(want[g].scores));
    }
  }
}

TEST(QFiltersKVCacheTest, GivesWhatItStoresOnDemand) {
  const LayerData data;
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  data.feed(cache, 100);
  const RowsView stored = cache.stored();
  EXPECT_EQ(stored.new_rows(), 0U);
  const auto states = cache.states();
  ASSERT_EQ(states.size(), data.groups());
  for (std::size_t g = 0; g < data.groups(); ++g) {
    const auto positions = cache.positions(g);
    ASSERT_EQ(stored.rows(g), 16U);
    for (std::size_t r = 0; r < 16; ++r) {
      const auto token = static_cast<std::size_t>(positions[r]);
      EXPECT_TRUE(data.is_token(stored, g, r, token));
      EXPECT_TRUE(std::ranges::equal(
          std::span(states[g].keys).subspan(r * data.dim, data.dim),
          data.keys.row(g / 3, g % 3, token)));
    }
    EXPECT_EQ(states[g].values.size(), 16 * data.value_dim);
    EXPECT_EQ(states[g].positions, positions);
    EXPECT_EQ(states[g].scores, cache.scores(g));
    EXPECT_TRUE(
        std::ranges::equal(states[g].filter_dir, data.filters.head(g % 3)));
  }
}

TEST(QFiltersKVCacheTest, ChangesNothingWhenItSettlesEarly) {
  const LayerData data;
  QFiltersKVCache early(config_of(16, 4), data.filters);
  QFiltersKVCache late(config_of(16, 4), data.filters);
  for (const std::size_t count : {50U, 1U, 9U}) {
    data.feed(early, count);
    early.settle();
    early.settle();
    data.feed(late, count);
    EXPECT_EQ(early.tokens_kept(), late.tokens_kept());
    EXPECT_EQ(early.nbytes(), late.nbytes());
  }
  for (std::size_t g = 0; g < data.groups(); ++g) {
    EXPECT_EQ(early.positions(g), late.positions(g));
  }
}

TEST(QFiltersKVCacheTest, AcceptsNoNewTokens) {
  const LayerData data;
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  EXPECT_EQ(data.feed(cache, 0).rows(0), 0U);
  EXPECT_FALSE(cache.empty());
  EXPECT_EQ(cache.qfilters_kept_bytes(), data.groups() * data.dim * 4);
  EXPECT_EQ(cache.compression_ratio(), 0.0);
  data.feed(cache, 40);
  const auto positions = cache.positions(5);
  EXPECT_EQ(data.feed(cache, 0).rows(5), 16U);
  EXPECT_EQ(cache.positions(5), positions);
  EXPECT_EQ(cache.offset(), 40U);
  EXPECT_EQ(cache.tokens_seen(), 40 * data.groups());
}

TEST(QFiltersKVCacheTest, CountsExactly) {
  for (const std::size_t value_dim : {20U, 12U}) {
    const LayerData data(120, DType::kFloat16, 20, value_dim);
    QFiltersKVCache cache(config_of(16, 4, 3), data.filters);
    std::size_t seen = 0;
    for (const std::size_t count : {5U, 11U, 1U, 0U, 100U, 1U}) {
      data.feed(cache, count);
      seen += count;
      const std::size_t kept = std::min<std::size_t>(seen, 16);
      const std::size_t row_bytes = 2 * (20 + value_dim);
      EXPECT_EQ(cache.offset(), seen);
      EXPECT_EQ(cache.size(), seen);
      EXPECT_EQ(cache.tokens_seen(), seen * 6);
      EXPECT_EQ(cache.tokens_kept(), kept);
      EXPECT_EQ(cache.nbytes(), 6 * kept * row_bytes);
      EXPECT_EQ(cache.qfilters_kept_bytes(), 6 * (kept * row_bytes + 80));
      EXPECT_EQ(cache.full_seq_bytes(), 6 * seen * row_bytes);
      EXPECT_EQ(
          cache.compression_ratio(),
          static_cast<double>(cache.full_seq_bytes()) /
              static_cast<double>(cache.qfilters_kept_bytes()));
    }
    EXPECT_GT(cache.compression_ratio(), 1.0);
  }
}

TEST(QFiltersKVCacheTest, KeepsTruePositionsOfSurvivors) {
  const LayerData data;
  QFiltersKVCache cache(config_of(12, 3, 4), data.filters);
  for (int i = 0; i < 30; ++i) {
    data.feed(cache, 4);
  }
  for (std::size_t g = 0; g < data.groups(); ++g) {
    const auto positions = cache.positions(g);
    ASSERT_EQ(positions.size(), 12U);
    EXPECT_TRUE(std::is_sorted(positions.begin(), positions.end()));
    EXPECT_THAT(
        std::vector(positions.begin(), positions.begin() + 3),
        ElementsAre(0, 1, 2));
    EXPECT_THAT(
        std::vector(positions.end() - 4, positions.end()),
        ElementsAre(116, 117, 118, 119));
  }
}

TEST(QFiltersKVCacheTest, StoresBFloat16OnlyWhenFirstKeysAndValuesBothAre) {
  const DType types[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  const std::vector<float> zeros(4);
  const LayerFilters filters{1, 4, {1, 0, 0, 0}};
  for (const DType k : types) {
    for (const DType v : types) {
      QFiltersKVCache cache(config_of(8, 0), filters);
      const auto view = [&](DType dtype) {
        return TensorView::dense(zeros.data(), dtype, 1, 1, 1, 4);
      };
      const bool both = k == DType::kBFloat16 && v == DType::kBFloat16;
      const DType want = both ? DType::kBFloat16 : DType::kFloat16;
      EXPECT_EQ(cache.update_and_fetch(view(k), view(v)).shape().dtype, want);
      // Later calls are cast to the type of the first.
      for (const DType later : types) {
        EXPECT_EQ(
            cache.update_and_fetch(view(later), view(later)).shape().dtype,
            want);
      }
    }
  }
}

TEST(QFiltersKVCacheTest, RoundsOtherTypesToTheStoredOne) {
  const std::vector<float> values = {
      1.0F + 0x1p-11F,
      65519.0F,
      65520.0F,
      -0.0F,
      0x1p-25F,
      test::kNaN,
      3e-8F,
      0.1F};
  const std::size_t n = values.size();
  const LayerFilters filters{1, n, std::vector<float>(n)};
  for (const DType stored : {DType::kFloat16, DType::kBFloat16}) {
    for (const DType given :
         {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      QFiltersKVCache cache(config_of(8, 0), filters);
      const HalfTensor zeros(stored, 1, 1, 1, n);
      cache.update_and_fetch(zeros.view(), zeros.view());
      HalfTensor halves(given, 1, 1, 1, n);
      if (given != DType::kFloat32) {
        for (std::size_t d = 0; d < n; ++d) {
          halves.data()[d] = encode(given, values[d]);
        }
      }
      const TensorView input =
          given == DType::kFloat32
              ? TensorView::dense(values.data(), given, 1, 1, 1, n)
              : halves.view();
      const RowsView rows = cache.update_and_fetch(input, input);
      std::vector<std::uint16_t> key(n);
      std::vector<std::uint16_t> value(n);
      rows.read_key(0, 1, key.data());
      rows.read_value(0, 1, value.data());
      EXPECT_EQ(key, value);
      for (std::size_t d = 0; d < n; ++d) {
        const std::uint16_t want =
            given == stored ? halves.data()[d]
            : given == DType::kFloat32
                ? encode(stored, values[d])
                : encode(stored, test::decode(given, halves.data()[d]));
        EXPECT_EQ(key[d], want) << to_string(given) << " " << values[d];
      }
    }
  }
}

TEST(QFiltersKVCacheTest, ScoresKeysAsTheyAreStored) {
  // Both round to 1 in float16: they tie, and the newer one stays.
  const std::vector<float> keys = {1.0F + 0x1p-12F, 1.0F, 0.5F};
  QFiltersKVCache cache(config_of(1, 0), LayerFilters{1, 1, {1.0F}});
  const auto view = TensorView::dense(keys.data(), DType::kFloat32, 1, 1, 3, 1);
  cache.update_and_fetch(view, view);
  EXPECT_THAT(cache.positions(), ElementsAre(1));
  EXPECT_THAT(cache.scores(), ElementsAre(1.0F));
}

TEST(QFiltersKVCacheTest, ReadsInputsOfAnyStrides) {
  const LayerData data(60);
  // The same rows as [tokens, batch, heads, dim], dense.
  HalfTensor moved(DType::kFloat16, 1, 1, 360, 20);
  for (std::size_t t = 0; t < 60; ++t) {
    for (std::size_t g = 0; g < 6; ++g) {
      std::ranges::copy(
          data.keys.row(g / 3, g % 3, t), moved.row(0, 0, t * 6 + g).begin());
    }
  }
  const TensorView view{
      moved.data().data(), DType::kFloat16, 2, 3, 60, 20, 60, 20, 120};
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  QFiltersKVCache want(config_of(16, 4), data.filters);
  cache.update_and_fetch(view, data.values.view());
  data.feed(want, 60);
  for (std::size_t g = 0; g < 6; ++g) {
    EXPECT_EQ(cache.positions(g), want.positions(g));
    const RowsView stored = cache.stored();
    for (std::size_t r = 0; r < 16; ++r) {
      EXPECT_TRUE(data.is_token(
          stored, g, r, static_cast<std::size_t>(cache.positions(g)[r])));
    }
  }
}

TEST(QFiltersKVCacheTest, CopiesItsInputs) {
  LayerData data(40);
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  const RowsView rows = data.feed(cache, 40);
  const LayerData same(40);
  std::ranges::fill(data.keys.data(), std::uint16_t{0});
  std::ranges::fill(data.values.data(), std::uint16_t{0});
  for (std::size_t t = 0; t < 40; ++t) {
    EXPECT_TRUE(same.is_token(rows, 2, t, t));
  }
  const auto token = static_cast<std::size_t>(cache.positions(2)[7]);
  EXPECT_TRUE(same.is_token(cache.stored(), 2, 7, token));
}

TEST(QFiltersKVCacheTest, ReadsBorrowedInputsWhereTheyAre) {
  const LayerData data(40);
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  const RowsView rows = data.feed(cache, 40, Inputs::kBorrowed);
  EXPECT_EQ(rows.new_keys().data, data.keys.view().data);
  EXPECT_EQ(rows.new_values().data, data.values.view().data);
}

TEST(QFiltersKVCacheTest, LeavesBorrowedInputsAloneOnceTheUpdateIsSettled) {
  LayerData data(40);
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  data.feed(cache, 40, Inputs::kBorrowed);
  cache.settle();
  const LayerData same(40);
  std::ranges::fill(data.keys.data(), std::uint16_t{0});
  std::ranges::fill(data.values.data(), std::uint16_t{0});
  for (std::size_t r = 0; r < 16; ++r) {
    const auto token = static_cast<std::size_t>(cache.positions(2)[r]);
    EXPECT_TRUE(same.is_token(cache.stored(), 2, r, token));
  }
}

TEST(QFiltersKVCacheTest, CopiesBorrowedInputsOfAnotherType) {
  const auto keys = test::random_floats(1, 2, 3, 40, 20);
  const LayerData halves(40);
  QFiltersKVCache cache(config_of(16, 4), halves.filters);
  QFiltersKVCache want(config_of(16, 4), halves.filters);
  const RowsView rows = cache.update_and_fetch(
      keys.view(), halves.values.view(), Inputs::kBorrowed);
  EXPECT_EQ(rows.new_keys().dtype, DType::kFloat16);
  EXPECT_EQ(rows.new_values().data, halves.values.view().data);
  want.update_and_fetch(keys.view(), halves.values.view());
  for (std::size_t g = 0; g < 6; ++g) {
    EXPECT_EQ(cache.positions(g), want.positions(g));
    EXPECT_EQ(bits_of(cache.scores(g)), bits_of(want.scores(g)));
  }
}

TEST(QFiltersKVCacheTest, AlwaysKeepsProtectedRowsAndEvictsNaNFirst) {
  const auto kept = [](const Config& config, std::vector<float> keys) {
    QFiltersKVCache cache(config, LayerFilters{1, 1, {1.0F}});
    const auto view =
        TensorView::dense(keys.data(), DType::kFloat32, 1, 1, keys.size(), 1);
    cache.update_and_fetch(view, view);
    EXPECT_EQ(
        cache.non_finite_scores(),
        static_cast<std::uint64_t>(std::ranges::count_if(
            keys, [](float x) { return !(std::abs(x) < 65520); })));
    return cache.positions();
  };
  const float nan = test::kNaN;
  const float inf = test::kInfinity;
  EXPECT_THAT(
      kept(config_of(4, 1), {0, nan, nan, nan, nan, 5, 6}),
      ElementsAre(0, 4, 5, 6));
  EXPECT_THAT(
      kept(config_of(4, 1), {0, 1, 2, nan, 5, 6, nan}),
      ElementsAre(0, 2, 4, 5));
  EXPECT_THAT(
      kept(config_of(4, 1, 1), {0, inf, inf, inf, inf, 1, 0}),
      ElementsAre(0, 3, 4, 6));
  EXPECT_THAT(
      kept(config_of(3, 1, 1), {-inf, 1, 2, 3, nan}), ElementsAre(0, 3, 4));
  EXPECT_THAT(kept(config_of(2, 0), {70000, 1, 2, 3}), ElementsAre(0, 3));
}

TEST(QFiltersKVCacheTest, RefusesTrim) {
  const LayerData data;
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  data.feed(cache, 20);
  static_assert(!QFiltersKVCache::is_trimmable());
  EXPECT_THAT(
      error_of([&] { cache.trim(3); }),
      IsError(ErrorKind::kUnsupported, "trim: 3"));
  EXPECT_EQ(cache.offset(), 20U);
}

TEST(QFiltersKVCacheTest, MovesWithItsState) {
  const LayerData data;
  QFiltersKVCache first(config_of(16, 4), data.filters);
  data.feed(first, 30);
  const auto positions = first.positions(1);
  QFiltersKVCache cache(std::move(first));
  EXPECT_EQ(cache.positions(1), positions);
  QFiltersKVCache other(config_of(8, 1), data.filters);
  other = std::move(cache);
  data.feed(other, 10);
  EXPECT_EQ(other.offset(), 40U);
  EXPECT_EQ(other.config().qfilters_budget, 16);
}

}  // namespace
}  // namespace qfilters
