#include "eval/tasks/rank_correlation.h"

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/test_util.h"

namespace qfilters::eval {
namespace {

using test::error_of;
using test::IsError;

/// Rank of a value: how many are smaller, and half of those that are equal.
double slow_rank(const std::vector<float>& values, float value) {
  double rank = 0;
  for (const float other : values) {
    rank += other < value ? 1.0 : (other == value ? 0.5 : 0.0);
  }
  return rank;
}

double slow_correlation(
    const std::vector<float>& a, const std::vector<float>& b) {
  const auto n = static_cast<double>(a.size());
  double xy = 0;
  double xx = 0;
  double yy = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = slow_rank(a, a[i]) - n / 2;
    const double y = slow_rank(b, b[i]) - n / 2;
    xy += x * y;
    xx += x * x;
    yy += y * y;
  }
  return xy / std::sqrt(xx * yy);
}

TEST(RankCorrelationTest, IsWhatItsDefinitionGivesAlsoWithTies) {
  test::Random random(3);
  for (const std::size_t n : {2U, 3U, 10U, 257U}) {
    for (const float values : {2.0F, 5.0F, 1e6F}) {
      std::vector<float> a{0, 1};
      std::vector<float> b{1, 0};
      while (a.size() < n) {
        a.push_back(std::round(random.normal() * values));
        b.push_back(std::round(a.back() / 2 + random.normal() * values));
      }
      const auto correlation = rank_correlation(a, b);
      ASSERT_TRUE(correlation.has_value());
      EXPECT_NEAR(*correlation, slow_correlation(a, b), 1e-12) << n;
    }
  }
}

TEST(RankCorrelationTest, SeesOrderAlone) {
  const std::vector<float> a{-3, 0, 1, 1000};
  EXPECT_DOUBLE_EQ(*rank_correlation(a, std::vector<float>{1, 2, 3, 4}), 1);
  EXPECT_DOUBLE_EQ(*rank_correlation(a, std::vector<float>{9, 8, 7, -7}), -1);
}

TEST(RankCorrelationTest, SaysNothingWhereNothingIsRanked) {
  const std::vector<float> a{1, 2, 3};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(rank_correlation(a, std::vector<float>{5, 5, 5}), std::nullopt);
  EXPECT_EQ(rank_correlation(std::vector<float>{5, 5, 5}, a), std::nullopt);
  EXPECT_EQ(rank_correlation(a, std::vector<float>{5, nan, 7}), std::nullopt);
  EXPECT_EQ(rank_correlation({}, {}), std::nullopt);
  EXPECT_THAT(
      error_of([&] { (void)rank_correlation(a, std::vector<float>{1}); }),
      IsError(ErrorKind::kInvalidArgument, "3 values and 1"));
}

}  // namespace
}  // namespace qfilters::eval
