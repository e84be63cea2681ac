// make_mask(): which stored and coming tokens a coming token may attend to.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/kv_cache.h"

#include "unit/kv_cache_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Kind = AttentionMask::Kind;
using test::config_of;
using test::LayerData;

constexpr std::size_t kNoWindow = 0;

QFiltersKVCache make_cache(const LayerData& data, std::size_t tokens) {
  QFiltersKVCache cache(config_of(16, 2), data.filters);
  if (tokens > 0) data.feed(cache, tokens);
  return cache;
}

TEST(MaskTest, IsNoneOrCausalBeforeTheFirstUpdate) {
  const LayerData data;
  auto cache = make_cache(data, 0);
  EXPECT_EQ(cache.make_mask(1).kind, Kind::kNone);
  EXPECT_EQ(cache.make_mask(1, true).kind, Kind::kNone);
  EXPECT_EQ(cache.make_mask(5).kind, Kind::kCausal);
  EXPECT_THAT(cache.make_mask(5).allowed, IsEmpty());
  EXPECT_TRUE(cache.empty());
}

TEST(MaskTest, IsAPlainArrayBeforeTheFirstUpdateOnDemand) {
  const LayerData data;
  auto cache = make_cache(data, 0);
  const AttentionMask mask = cache.make_mask(3, true);
  EXPECT_EQ(mask.kind, Kind::kArray);
  EXPECT_EQ(mask.batch, 1U);
  EXPECT_EQ(mask.queries, 3U);
  EXPECT_EQ(mask.keys, 3U);
  EXPECT_THAT(mask.allowed, ElementsAre(1, 0, 0, 1, 1, 0, 1, 1, 1));
}

TEST(MaskTest, IsAnArrayWheneverThereIsAWindow) {
  const LayerData data;
  auto cache = make_cache(data, 0);
  EXPECT_THAT(
      cache.make_mask(3, false, 2).allowed,
      ElementsAre(1, 0, 0, 1, 1, 0, 0, 1, 1));
  EXPECT_THAT(cache.make_mask(1, false, 12).allowed, ElementsAre(1));
  data.feed(cache, 5);
  EXPECT_THAT(
      cache.make_mask(1, false, 3).allowed,
      ElementsAre(0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1));
}

TEST(MaskTest, IsNoneForASingleTokenWithoutAWindow) {
  const LayerData data;
  auto cache = make_cache(data, 5);
  EXPECT_EQ(cache.make_mask(1).kind, Kind::kNone);
  EXPECT_EQ(cache.make_mask(1, true).kind, Kind::kNone);
}

TEST(MaskTest, IsAnArrayForSeveralTokensEvenIfNothingWasEvicted) {
  const LayerData data;
  auto cache = make_cache(data, 2);
  const AttentionMask mask = cache.make_mask(2);
  EXPECT_EQ(mask.kind, Kind::kArray);
  EXPECT_EQ(mask.batch, 2U);
  EXPECT_EQ(mask.queries, 2U);
  EXPECT_EQ(mask.keys, 4U);
  EXPECT_THAT(
      mask.allowed,
      ElementsAre(1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1));
}

TEST(MaskTest, SeesStoredRowsByTheirTruePositionsOfHeadZero) {
  const LayerData data;
  for (const std::size_t window : {kNoWindow, 1UL, 3UL, 12UL, 40UL, 1000UL}) {
    auto cache = make_cache(data, 40);
    const AttentionMask mask = cache.make_mask(5, false, window);
    ASSERT_EQ(mask.batch, 2U);
    ASSERT_EQ(mask.keys, 16U + 5U);
    ASSERT_EQ(mask.allowed.size(), 2U * 5U * 21U);
    for (std::size_t b = 0; b < 2; ++b) {
      auto positions = cache.positions(b * data.heads);
      for (std::int32_t t = 40; t < 45; ++t) {
        positions.push_back(t);
      }
      for (std::int32_t q = 0; q < 5; ++q) {
        for (std::size_t k = 0; k < 21; ++k) {
          const std::int32_t distance = 40 + q - positions[k];
          const bool want =
              distance >= 0 && (window == kNoWindow ||
                                distance < static_cast<std::int32_t>(window));
          const std::size_t row = b * 5 + static_cast<std::size_t>(q);
          EXPECT_EQ(mask.allowed[row * 21 + k], want ? 1 : 0)
              << "window " << window << " query " << q << " key " << k;
        }
      }
    }
  }
}

TEST(MaskTest, TakesAHugeWindowAsNone) {
  const LayerData data;
  auto cache = make_cache(data, 40);
  const auto want = cache.make_mask(3).allowed;
  for (const std::size_t window :
       {std::numeric_limits<std::size_t>::max(), std::size_t{1} << 63}) {
    EXPECT_EQ(cache.make_mask(3, false, window).allowed, want);
  }
}

TEST(MaskTest, HasNoQueriesForNoTokens) {
  const LayerData data;
  auto cache = make_cache(data, 40);
  const AttentionMask mask = cache.make_mask(0);
  EXPECT_EQ(mask.queries, 0U);
  EXPECT_EQ(mask.keys, 16U);
  EXPECT_THAT(mask.allowed, IsEmpty());
}

}  // namespace
}  // namespace qfilters
