// The reference system's calibration functions; their golden vectors are in
// tests/conformance.
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/calibrator.h"
#include "qfilters/error.h"

#include "unit/test_util.h"

namespace qfilters {
namespace {

using test::error_of;
using test::FloatTensor;
using test::HalfTensor;
using test::IsError;
using test::random_floats;
using ::testing::Each;
using ::testing::ElementsAre;

FloatTensor zeros(
    std::size_t batch, std::size_t heads, std::size_t tokens, std::size_t dim) {
  return {DType::kFloat32, batch, heads, tokens, dim};
}

TEST(ComputeQfiltersTest, IsTheCalibratorWithoutGroups) {
  const FloatTensor queries = random_floats(1, 1, 3, 70, 24);
  Calibrator calibrator({{3, 3, 24}});
  calibrator.add(0, queries.view());
  EXPECT_EQ(compute_qfilters(queries.view()), calibrator.finish({}).layer(0));
}

TEST(ComputeQfiltersTest, TakesEvenlySpacedRowsOfEachHead) {
  // trunc(i * (10 - 1) / (4 - 1)) = 0, 3, 6, 9.
  const FloatTensor queries = random_floats(2, 1, 2, 10, 8);
  TensorView some = queries.view();
  some.tokens = 4;
  some.token_stride *= 3;
  EXPECT_EQ(compute_qfilters(queries.view(), 4), compute_qfilters(some));
}

TEST(ComputeQfiltersTest, TakesAllRowsUpToTheLimit) {
  const FloatTensor queries = random_floats(3, 1, 1, 9, 8);
  EXPECT_EQ(
      compute_qfilters(queries.view(), 9), compute_qfilters(queries.view()));
  EXPECT_NE(
      compute_qfilters(queries.view(), 8), compute_qfilters(queries.view()));
}

TEST(ComputeQfiltersTest, ReadsEveryType) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const HalfTensor halves = test::random_halves(4, dtype, 1, 2, 12, 8);
    FloatTensor floats = zeros(1, 2, 12, 8);
    for (std::size_t h = 0; h < 2; ++h) {
      for (std::size_t t = 0; t < 12; ++t) {
        for (std::size_t d = 0; d < 8; ++d) {
          floats.row(0, h, t)[d] = test::decode(dtype, halves.row(0, h, t)[d]);
        }
      }
    }
    EXPECT_EQ(compute_qfilters(halves.view()), compute_qfilters(floats.view()));
  }
}

TEST(ComputeQfiltersTest, GivesTheFirstUnitVectorForZeroQueries) {
  EXPECT_THAT(
      compute_qfilters(zeros(1, 1, 5, 3).view()).values, ElementsAre(1, 0, 0));
}

TEST(ComputeQfiltersTest, GivesNothingForNoHeads) {
  EXPECT_EQ(
      compute_qfilters(zeros(1, 0, 5, 3).view()), (LayerFilters{0, 3, {}}));
}

TEST(ComputeQfiltersTest, RefusesInTheOrderOfTheReference) {
  const auto error =
      [](std::size_t batch, std::size_t tokens, std::size_t samples) {
        return error_of([=] {
          static_cast<void>(
              compute_qfilters(zeros(batch, 2, tokens, 4).view(), samples));
        });
      };
  EXPECT_THAT(error(2, 1, 1), IsError(ErrorKind::kShape, "[2, 2, 1, 4]"));
  EXPECT_THAT(error(1, 1, 1), IsError(ErrorKind::kInvalidArgument, "tokens=1"));
  EXPECT_THAT(
      error(1, 2, 1),
      IsError(ErrorKind::kInvalidArgument, "max_svd_samples must be"));
}

TEST(ComputeQfiltersTest, RefusesANonFiniteQueryThatItTakes) {
  FloatTensor queries = random_floats(5, 1, 2, 10, 4);
  queries.row(0, 1, 4)[2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(
      error_of([&] { static_cast<void>(compute_qfilters(queries.view())); }),
      IsError(ErrorKind::kInvalidArgument, "not finite: head=1 token=4"));
  EXPECT_EQ(compute_qfilters(queries.view(), 4).heads, 2U);  // not row 4
}

TEST(AverageGqaFiltersTest, NormalisesTheMeanOfEachGroup) {
  const LayerFilters in{4, 2, {1, 0, 0, 1, 0, -2, 0, -4}};
  const float half = std::numbers::sqrt2_v<float> / 2;
  EXPECT_THAT(
      average_gqa_filters(in, 2).values, ElementsAre(half, half, 0, -1));
}

TEST(AverageGqaFiltersTest, NormalisesWithoutGroupsToo) {
  EXPECT_THAT(
      average_gqa_filters({1, 2, {3, 4}}, 1).values, ElementsAre(0.6F, 0.8F));
}

TEST(AverageGqaFiltersTest, GivesZeroForFiltersThatCancel) {
  EXPECT_THAT(
      average_gqa_filters({2, 3, {1, 2, 3, -1, -2, -3}}, 1).values, Each(0.0F));
}

TEST(AverageGqaFiltersTest, RefusesInTheOrderOfTheReference) {
  const auto error = [](const LayerFilters& in, std::size_t kv_heads) {
    return error_of(
        [&] { static_cast<void>(average_gqa_filters(in, kv_heads)); });
  };
  const LayerFilters good{4, 1, {1, 2, 3, 4}};
  EXPECT_THAT(
      error({4, 2, {1, 2, 3, 4}}, 0), IsError(ErrorKind::kShape, "[4, 2]"));
  EXPECT_THAT(
      error(good, 0), IsError(ErrorKind::kInvalidArgument, "kv_heads=0"));
  EXPECT_THAT(
      error(good, 3), IsError(ErrorKind::kInvalidArgument, "kv_heads=3"));
}

}  // namespace
}  // namespace qfilters
