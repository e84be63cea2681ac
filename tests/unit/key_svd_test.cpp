#include "core/key_svd.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/test_util.h"

namespace qfilters {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsNan;

using test::random_filter;

// The covariance of rows in float64, by its definition.
std::vector<double> covariance_of(
    const std::vector<float>& keys, std::size_t rows, std::size_t dim) {
  std::vector<double> mean(dim);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    mean[i % dim] += double{keys[i]} / static_cast<double>(rows);
  }
  std::vector<double> out(dim * dim);
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t a = 0; a < dim; ++a) {
      for (std::size_t b = 0; b < dim; ++b) {
        out[a * dim + b] += (keys[r * dim + a] - mean[a]) *
                            (keys[r * dim + b] - mean[b]) /
                            static_cast<double>(rows - 1);
      }
    }
  }
  return out;
}

TEST(KeyDirectionTest, IsTheTopEigenvectorOfTheCentredCovariance) {
  for (const std::size_t dim : {1U, 2U, 16U, 33U, 80U}) {
    const std::size_t rows = 2 * dim + 5;
    auto keys = random_filter(dim, rows * dim);
    // One wide axis, and a mean that would win if it were not taken out.
    const auto axis = random_filter(dim + 1, dim);
    test::Random random(1);
    for (std::size_t r = 0; r < rows; ++r) {
      const float along = 3 * random.normal();
      for (std::size_t d = 0; d < dim; ++d) {
        keys[r * dim + d] += along * axis[d] + 20;
      }
    }
    const auto v = key_direction(keys, rows, dim);
    const auto c = covariance_of(keys, rows, dim);
    double norm = 0;
    double top = 0;
    double trace = 0;
    std::vector<double> cv(dim);
    for (std::size_t a = 0; a < dim; ++a) {
      norm += double{v[a]} * v[a];
      trace += c[a * dim + a];
      for (std::size_t b = 0; b < dim; ++b) {
        cv[a] += c[a * dim + b] * v[b];
      }
      top += cv[a] * v[a];
    }
    // Each component is rounded to float32: half an ulp of at most 1.
    const double rounding = 0x1p-24 * std::sqrt(static_cast<double>(dim));
    EXPECT_NEAR(norm, 1.0, 4 * rounding);
    for (std::size_t a = 0; a < dim; ++a) {
      EXPECT_NEAR(cv[a], top * v[a], 4 * rounding * trace);
    }
    // The planted axis holds more than half of all variance: no other
    // eigenvalue can be as large.
    EXPECT_GT(top, trace / 2);
  }
}

TEST(KeyDirectionTest, MakesTheLargestComponentPositive) {
  EXPECT_THAT(
      key_direction(std::vector<float>{1, -3, -1, 3}, 2, 2),
      ElementsAre(
          ::testing::FloatEq(-std::sqrt(0.1F)),
          ::testing::FloatEq(std::sqrt(0.9F))));
  // The first one on ties.
  const auto tie = key_direction(std::vector<float>{-1, 1, 1, -1}, 2, 2);
  EXPECT_GT(tie[0], 0.0F);
  EXPECT_LT(tie[1], 0.0F);
}

TEST(KeyDirectionTest, IsTheLastUnitVectorWhenRowsDoNotDiffer) {
  EXPECT_THAT(
      key_direction(std::vector<float>{5, 6, 7}, 1, 3), ElementsAre(0, 0, 1));
  for (const std::size_t rows : {2U, 41U, 47U, 100U}) {
    std::vector<float> same;
    for (std::size_t r = 0; r < rows; ++r) {
      same.insert(same.end(), {0.5F, 0.1F, -3.3F, 7.0F});
    }
    EXPECT_THAT(key_direction(same, rows, 4), ElementsAre(0, 0, 0, 1));
  }
}

TEST(KeyDirectionTest, IsNaNForNonFiniteKeys) {
  for (const float bad : {test::kNaN, test::kInfinity, -test::kInfinity}) {
    std::vector<float> keys = random_filter(1, 12);
    keys[7] = bad;
    EXPECT_THAT(key_direction(keys, 4, 3), Each(IsNan()));
  }
}

TEST(GroupScorerTest, ProjectsEachGroupOnItsOwnDirection) {
  const auto directions = random_filter(1, 120);
  const auto scorer = make_group_scorer(directions, -1);
  const auto keys = test::random_halves(2, DType::kFloat16, 2, 3, 5, 20);
  for (std::size_t g = 0; g < 6; ++g) {
    std::vector<float> out(5);
    scorer->score({0, g / 3, g % 3, keys.view(), 0}, out);
    for (std::size_t t = 0; t < 5; ++t) {
      EXPECT_EQ(
          out[t],
          test::canonical_score(
              DType::kFloat16,
              keys.row(g / 3, g % 3, t),
              std::span(directions).subspan(g * 20, 20),
              -1.0F));
    }
  }
}

}  // namespace
}  // namespace qfilters
