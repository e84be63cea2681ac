// Without calibrated filters: the key-SVD fallback.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"
#include "qfilters/kv_cache.h"

#include "core/key_svd.h"
#include "unit/kv_cache_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;

using test::bits_of;
using test::config_of;
using test::error_of;
using test::HalfTensor;
using test::IsError;
using test::LayerData;
using test::ReferenceHead;

Config fallback(std::int64_t budget, std::int64_t calib_tokens) {
  Config config = config_of(budget, 2, 3);
  config.qfilters_calib_tokens = calib_tokens;
  return config;
}

TEST(FallbackTest, KeepsEverythingUntilItHasSeenEnoughTokens) {
  const LayerData data;
  QFiltersKVCache cache(fallback(8, 64));
  EXPECT_TRUE(cache.empty());
  for (const std::size_t count : {30U, 1U, 32U})
    data.feed(cache, count);
  EXPECT_EQ(cache.tokens_kept(), 63U);
  EXPECT_EQ(cache.qfilters_kept_bytes(), cache.full_seq_bytes());
  EXPECT_EQ(cache.compression_ratio(), 1.0);
  EXPECT_THAT(cache.states()[0].filter_dir, IsEmpty());
}

TEST(FallbackTest, FreezesFiltersFromAllRowsOfTheUpdateThatCrosses) {
  for (const std::size_t first : {0U, 1U, 40U, 63U}) {
    const LayerData data;
    QFiltersKVCache cache(fallback(8, 64));
    if (first > 0) data.feed(cache, first);
    const RowsView rows = data.feed(cache, 100 - first);
    EXPECT_EQ(rows.rows(0), 100U);  // this call's attention sees them all
    EXPECT_EQ(cache.tokens_kept(), 8U);
    const auto states = cache.states();
    for (std::size_t g = 0; g < data.groups(); ++g) {
      std::vector<float> keys;
      for (std::size_t t = 0; t < 100; ++t) {
        for (const auto x : data.keys.row(g / 3, g % 3, t)) {
          keys.push_back(from_float16(x));
        }
      }
      EXPECT_EQ(states[g].filter_dir, key_direction(keys, 100, data.dim));
    }
  }
}

TEST(FallbackTest, ThenEvictsByThoseFiltersForGood) {
  for (const float sign : {1.0F, -1.0F}) {
    const LayerData data;
    Config config = fallback(20, 50);
    config.qfilters_sign = static_cast<std::int64_t>(sign);
    QFiltersKVCache cache(config);
    data.feed(cache, 30);
    data.feed(cache, 30);
    const auto frozen = cache.states();
    for (int i = 0; i < 6; ++i) {
      data.feed(cache, 10);
    }
    for (std::size_t g = 0; g < data.groups(); ++g) {
      const auto& filter = frozen[g].filter_dir;
      ReferenceHead want;
      for (std::size_t t = 0; t < 120; ++t) {
        want.add(
            static_cast<std::int32_t>(t),
            test::canonical_score(
                DType::kFloat16, data.keys.row(g / 3, g % 3, t), filter, sign));
      }
      want.evict(20, {2, 3}, 0);
      EXPECT_EQ(cache.positions(g), want.positions);
      EXPECT_EQ(bits_of(cache.scores(g)), bits_of(want.scores));
      EXPECT_EQ(cache.states()[g].filter_dir, filter);
    }
  }
}

TEST(FallbackTest, CountsFilterBytesOnceTheyExist) {
  const LayerData data;
  QFiltersKVCache cache(fallback(8, 64));
  data.feed(cache, 0);
  EXPECT_FALSE(cache.empty());
  EXPECT_EQ(cache.qfilters_kept_bytes(), 0U);
  EXPECT_EQ(cache.compression_ratio(), 1.0);
  data.feed(cache, 63);
  EXPECT_EQ(cache.qfilters_kept_bytes(), cache.nbytes());
  data.feed(cache, 1);
  EXPECT_EQ(
      cache.qfilters_kept_bytes(),
      cache.nbytes() + data.groups() * data.dim * 4);
}

TEST(FallbackTest, KeepsSinksAndTheNewestRowsWhenKeysAreNotFinite) {
  LayerData data;
  data.keys.row(0, 0, 7)[3] = 0x7E00;
  QFiltersKVCache cache(fallback(8, 64));
  data.feed(cache, 100);
  EXPECT_THAT(cache.states()[0].filter_dir, Each(::testing::IsNan()));
  EXPECT_THAT(
      cache.positions(0), ::testing::ElementsAre(0, 1, 94, 95, 96, 97, 98, 99));
  // Other heads do not care.
  EXPECT_THAT(
      cache.scores(1),
      Each(::testing::Truly([](float x) { return std::isfinite(x); })));
}

TEST(FallbackTest, TakesTheShapesOfTheFirstUpdate) {
  const LayerData data;
  QFiltersKVCache cache(fallback(8, 64));
  data.feed(cache, 5);
  const HalfTensor other(DType::kFloat16, 2, 2, 5, 20);
  EXPECT_THAT(
      error_of([&] { cache.update_and_fetch(other.view(), other.view()); }),
      IsError(ErrorKind::kShape, "after batch=2 heads=3"));
  EXPECT_EQ(cache.offset(), 5U);
}

TEST(FallbackTest, RejectsKeysWithoutHeadsOrDimensions) {
  QFiltersKVCache cache(fallback(8, 64));
  const HalfTensor heads(DType::kFloat16, 1, 0, 5, 20);
  const HalfTensor dims(DType::kFloat16, 1, 1, 5, 0);
  const HalfTensor values(DType::kFloat16, 1, 1, 5, 20);
  EXPECT_THAT(
      error_of([&] { cache.update_and_fetch(heads.view(), heads.view()); }),
      IsError(ErrorKind::kShape, "[1, 0, 5, 20]"));
  EXPECT_THAT(
      error_of([&] { cache.update_and_fetch(dims.view(), values.view()); }),
      IsError(ErrorKind::kShape, "[1, 1, 5, 0]"));
  EXPECT_TRUE(cache.empty());
}

TEST(FallbackTest, WatchesRetentionToo) {
  const LayerData data;
  Config config = fallback(8, 64);
  config.qfilters_on_low_retention = "raise";
  QFiltersKVCache cache(config);
  data.feed(cache, 63);
  EXPECT_THAT(
      error_of([&] { data.feed(cache, 1); }),
      IsError(ErrorKind::kLowRetention, "8 of 64 tokens"));
  EXPECT_EQ(cache.offset(), 64U);
  data.feed(cache, 1);
  EXPECT_EQ(cache.positions(0).back(), 64);
}

}  // namespace
}  // namespace qfilters
