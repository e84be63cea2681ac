#include "qfilters/query_statistics.h"

#include <cmath>
#include <random>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/test_util.h"

namespace qfilters {
namespace {

using test::error_of;
using test::IsError;

// Pairs (0, 2) and (1, 3); dimension 4 does not turn.
const Rotation kRotation = {{-1.0F, -0.1F, 1.0F, 0.1F, 0}, {2, 3, 0, 1, 4}};
constexpr std::size_t kDim = 5;
const QueryLayer kLayer = {{4, 2, kDim}, kRotation, 0.5F};

std::vector<float> normal(std::size_t n) {
  std::mt19937 random(7);
  std::normal_distribution<float> of(0.3F, 1.0F);
  std::vector<float> out(n);
  for (float& x : out)
    x = of(random);
  return out;
}

TensorView view(const std::vector<float>& rows, std::size_t heads) {
  return TensorView::dense(
      rows.data(), DType::kFloat32, 1, heads, rows.size() / heads / kDim, kDim);
}

// Rotates each pair by hand: first position and what is written for each row.
std::vector<float> turn(
    const std::vector<float>& rows, std::size_t heads, int first) {
  std::vector<float> out = rows;
  const std::size_t tokens = rows.size() / heads / kDim;
  for (std::size_t r = 0; r < heads * tokens; ++r) {
    const double p = first + static_cast<double>(r % tokens);
    for (std::size_t i = 0; i < 2; ++i) {
      const double angle = p * (i == 0 ? 1.0 : 0.1F);
      const double x = rows[r * kDim + i];
      const double y = rows[r * kDim + i + 2];
      out[r * kDim + i] = float(x * std::cos(angle) - y * std::sin(angle));
      out[r * kDim + i + 2] = float(x * std::sin(angle) + y * std::cos(angle));
    }
  }
  return out;
}

TEST(QueryStatisticsTest, TurningBackUndoesRope) {
  const auto rows = normal(4 * 9 * kDim);
  const auto back = turn_back(kRotation, view(turn(rows, 4, 31), 4), 31);
  for (std::size_t i = 0; i < rows.size(); ++i)
    EXPECT_NEAR(back[i], rows[i], 1e-5) << i;
}

TEST(QueryStatisticsTest, AreMeanAndCovarianceBeforeRopeTimesTheScale) {
  constexpr std::size_t kTokens = 40;
  const auto rows = normal(4 * kTokens * kDim);
  QueryStatistics statistics({kLayer});
  // In two parts, each at its positions.
  const auto turned = turn(rows, 4, 6);
  TensorView part = view(turned, 4);
  part.tokens = 13;
  statistics.add(0, part, 6);
  part.data = view(turned, 4).row(0, 0, 13);
  part.tokens = kTokens - 13;
  statistics.add(0, part, 19);
  const FilterBank bank = statistics.finish({});
  EXPECT_EQ(bank.metadata().n_samples, kTokens);
  ASSERT_EQ(bank.layer(0).heads, 2U);
  ASSERT_EQ(bank.layer(0).dim, statistics_size(kDim, 2));
  for (std::size_t head = 0; head < 4; ++head) {
    const auto values = bank.layer(0).head(head / 2);
    for (std::size_t d = 0; d < kDim; ++d) {
      EXPECT_EQ(values[d], kRotation.angle[d]);
      EXPECT_EQ(values[kDim + d], float(kRotation.partner[d]));
    }
    const auto at = [&](std::size_t t, std::size_t d) {
      return double{rows[(head * kTokens + t) * kDim + d]};
    };
    std::vector<double> mean(kDim);
    for (std::size_t d = 0; d < kDim; ++d) {
      for (std::size_t t = 0; t < kTokens; ++t)
        mean[d] += at(t, d) / kTokens;
    }
    const auto own = values.subspan(2 * kDim + head % 2 * (kDim + 15));
    std::size_t next = kDim;
    for (std::size_t i = 0; i < kDim; ++i) {
      EXPECT_NEAR(own[i], mean[i] * 0.5, 1e-5);
      for (std::size_t j = 0; j <= i; ++j) {
        double covariance = 0;
        for (std::size_t t = 0; t < kTokens; ++t)
          covariance += (at(t, i) - mean[i]) * (at(t, j) - mean[j]) / kTokens;
        EXPECT_NEAR(own[next++], covariance * 0.25, 1e-5) << i << " " << j;
      }
    }
  }
}

TEST(QueryStatisticsTest, SizesTellHowManyQueryHeadsThereAre) {
  for (const std::size_t dim : {1U, 5U, 64U, 256U}) {
    for (const std::size_t heads : {1U, 3U, 16U}) {
      const std::size_t size = statistics_size(dim, heads);
      EXPECT_EQ(statistics_heads(dim, size), heads);
      EXPECT_EQ(statistics_heads(dim, size + 1), 0U);
    }
  }
  EXPECT_EQ(statistics_heads(64, 128), 0U);
  EXPECT_EQ(statistics_heads(0, 8), 0U);
}

TEST(QueryStatisticsTest, LeaveLayersOutThatHaveSeenNothing) {
  QueryStatistics statistics({kLayer, kLayer});
  const auto rows = normal(4 * 2 * kDim);
  statistics.add(1, view(rows, 4), 0);
  const FilterBank bank = statistics.finish({});
  EXPECT_THAT(bank.layer(0).values, ::testing::Each(0.0F));
  EXPECT_EQ(bank.layer(0).dim, bank.layer(1).dim);
  EXPECT_EQ(bank.metadata().n_samples, 2U);
}

TEST(QueryStatisticsTest, RefuseWhatDoesNotFit) {
  QueryLayer odd = kLayer;
  odd.rotation.partner[1] = kDim;
  EXPECT_THAT(
      error_of([&] {
        QueryStatistics({kLayer, odd});
      }),
      IsError(ErrorKind::kInvalidArgument, "layer 1 of dim=5"));
  QueryStatistics statistics({kLayer});
  EXPECT_THAT(
      error_of([&] { (void)statistics.finish({}); }),
      IsError(ErrorKind::kInvalidArgument, "no queries seen"));
  const auto rows = normal(4 * kDim);
  EXPECT_THAT(
      error_of([&] { statistics.add(1, view(rows, 4), 0); }),
      IsError(ErrorKind::kInvalidArgument, "layer=1 with layers=1"));
  EXPECT_THAT(
      error_of([&] { statistics.add(0, view(rows, 2), 0); }),
      IsError(ErrorKind::kShape, "query_heads=4"));
  TensorView half = view(rows, 4);
  half.dtype = DType::kFloat16;
  EXPECT_THAT(
      error_of([&] { statistics.add(0, half, 0); }),
      IsError(ErrorKind::kShape, "turn back"));
  statistics.add(0, view(rows, 4), 0);
  EXPECT_THAT(
      error_of([&] { (void)statistics.finish({}); }),
      IsError(ErrorKind::kInvalidArgument, "rows=1"));
}

}  // namespace
}  // namespace qfilters
