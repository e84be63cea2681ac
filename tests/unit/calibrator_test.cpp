#include "qfilters/calibrator.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"

namespace qfilters {
namespace {

using ::testing::HasSubstr;

// Both sides find eigenvectors in float64; what is left is the rounding of a
// unit vector's components to float32.
constexpr double kTolerance = 0x1p-23;

// Queries [heads, tokens, dim] around a random direction per head, with noise
// small enough for a clear first eigenvalue.
std::vector<float> random_queries(
    std::size_t heads, std::size_t tokens, std::size_t dim, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> queries(heads * tokens * dim);
  for (std::size_t h = 0; h < heads; ++h) {
    std::vector<float> direction(dim);
    for (float& x : direction) {
      x = normal(generator);
    }
    for (std::size_t t = 0; t < tokens; ++t) {
      const float length = 0.5F + normal(generator);
      for (std::size_t d = 0; d < dim; ++d) {
        queries[(h * tokens + t) * dim + d] =
            length * direction[d] + 0.5F * normal(generator);
      }
    }
  }
  return queries;
}

TensorView view_of(
    const std::vector<float>& queries, std::size_t heads, std::size_t dim) {
  return TensorView::dense(
      queries.data(),
      DType::kFloat32,
      1,
      heads,
      queries.size() / heads / dim,
      dim);
}

// The first right singular vector of `queries` [tokens, dim] by one-sided
// Jacobi rotations: columns of Q V become orthogonal. Oriented to v . sum >= 0.
std::vector<double> first_singular_vector(
    std::span<const float> queries, std::size_t dim) {
  const std::size_t tokens = queries.size() / dim;
  std::vector<double> a(queries.begin(), queries.end());  // [tokens, dim]
  std::vector<double> v(dim * dim);
  for (std::size_t d = 0; d < dim; ++d) {
    v[d * dim + d] = 1;
  }
  const auto dot = [&](std::size_t p, std::size_t q) {
    double sum = 0;
    for (std::size_t t = 0; t < tokens; ++t) {
      sum += a[t * dim + p] * a[t * dim + q];
    }
    return sum;
  };
  const auto rotate = [dim](
                          std::vector<double>& m,
                          std::size_t p,
                          std::size_t q,
                          double c,
                          double s) {
    for (std::size_t row = 0; row < m.size() / dim; ++row) {
      const double x = m[row * dim + p];
      const double y = m[row * dim + q];
      m[row * dim + p] = c * x - s * y;
      m[row * dim + q] = s * x + c * y;
    }
  };
  double worst = 1;
  for (int sweep = 0; sweep < 60 && worst > 1e-15; ++sweep) {
    worst = 0;
    for (std::size_t p = 0; p < dim; ++p) {
      for (std::size_t q = p + 1; q < dim; ++q) {
        const double pp = dot(p, p);
        const double qq = dot(q, q);
        const double pq = dot(p, q);
        const double cosine = pq == 0 ? 0 : std::abs(pq) / std::sqrt(pp * qq);
        worst = std::max(worst, cosine);
        if (cosine < 1e-16) continue;
        const double zeta = (qq - pp) / (2 * pq);
        const double tangent =
            std::copysign(1.0, zeta) / (std::abs(zeta) + std::hypot(1.0, zeta));
        const double c = 1 / std::hypot(1.0, tangent);
        rotate(a, p, q, c, c * tangent);
        rotate(v, p, q, c, c * tangent);
      }
    }
  }
  std::size_t first = 0;
  for (std::size_t d = 1; d < dim; ++d) {
    if (dot(d, d) > dot(first, first)) first = d;
  }
  double orientation = 0;  // the sum over Q v
  for (std::size_t t = 0; t < tokens; ++t) {
    orientation += a[t * dim + first];
  }
  std::vector<double> result(dim);
  for (std::size_t d = 0; d < dim; ++d) {
    result[d] = v[d * dim + first] * (orientation < 0 ? -1 : 1);
  }
  return result;
}

void expect_near(
    std::span<const float> actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t d = 0; d < expected.size(); ++d) {
    EXPECT_NEAR(actual[d], expected[d], kTolerance) << "at " << d;
  }
}

ErrorKind kind_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.kind();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorKind::kRuntime;
}

class CalibratorShapeTest : public ::testing::TestWithParam<std::size_t> {};

TEST_P(CalibratorShapeTest, FindsTheFirstSingularVectorOfEveryHead) {
  const std::size_t dim = GetParam();
  constexpr std::size_t kHeads = 3;
  for (const std::size_t tokens : {2U, 63U, 64U, 65U, 200U}) {
    SCOPED_TRACE("seed 7, tokens " + std::to_string(tokens));
    const auto queries = random_queries(kHeads, tokens, dim, 7);
    Calibrator calibrator({{kHeads, kHeads, dim}});
    calibrator.add(0, view_of(queries, kHeads, dim));
    const FilterBank bank = calibrator.finish({});
    ASSERT_EQ(bank.layer(0).heads, kHeads);
    ASSERT_EQ(bank.layer(0).dim, dim);
    for (std::size_t h = 0; h < kHeads; ++h) {
      const auto rows =
          std::span(queries).subspan(h * tokens * dim, tokens * dim);
      expect_near(bank.layer(0).head(h), first_singular_vector(rows, dim));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    EachDim,
    CalibratorShapeTest,
    ::testing::Values(1, 3, 4, 5, 64, 80),
    [](const auto& param) { return "dim" + std::to_string(param.param); });

TEST(CalibratorTest, OrientsFiltersAlongTheSumOfTheQueries) {
  constexpr std::size_t kHeads = 4;
  constexpr std::size_t kDim = 8;
  for (unsigned seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    const auto queries = random_queries(kHeads, 50, kDim, seed);
    Calibrator calibrator({{kHeads, kHeads, kDim}});
    calibrator.add(0, view_of(queries, kHeads, kDim));
    const FilterBank bank = calibrator.finish({});
    for (std::size_t h = 0; h < kHeads; ++h) {
      double projection = 0;
      for (std::size_t i = 0; i < 50 * kDim; ++i) {
        projection += double{queries[h * 50 * kDim + i]} *
                      double{bank.layer(0).head(h)[i % kDim]};
      }
      EXPECT_GE(projection, 0);
    }
  }
}

TEST(CalibratorTest, FlipsTheFilterWithTheQueries) {
  auto queries = random_queries(1, 30, 16, 3);
  Calibrator calibrator({{1, 1, 16}});
  calibrator.add(0, view_of(queries, 1, 16));
  for (float& x : queries) {
    x = -x;
  }
  Calibrator flipped({{1, 1, 16}});
  flipped.add(0, view_of(queries, 1, 16));
  const auto values = calibrator.finish({}).layer(0).values;
  auto expected = flipped.finish({}).layer(0).values;
  for (float& x : expected) {
    x = -x;
  }
  EXPECT_EQ(values, expected);
}

TEST(CalibratorTest, ChoosesASignForQueriesThatCancel) {
  const std::vector<float> queries = {3, -4, -3, 4};
  Calibrator calibrator({{1, 1, 2}});
  calibrator.add(0, view_of(queries, 1, 2));
  expect_near(calibrator.finish({}).layer(0).head(0), {-0.6, 0.8});
}

TEST(CalibratorTest, GivesTheFirstAxisForZeroQueries) {
  Calibrator calibrator({{2, 2, 3}});
  calibrator.add(0, view_of(std::vector<float>(30), 2, 3));
  const std::vector<float> expected = {1, 0, 0, 1, 0, 0};
  EXPECT_EQ(calibrator.finish({}).layer(0).values, expected);
}

TEST(CalibratorTest, AveragesConsecutiveQueryHeads) {
  constexpr std::size_t kDim = 16;
  const auto queries = random_queries(6, 40, kDim, 11);
  Calibrator grouped({{6, 2, kDim}});
  Calibrator single({{6, 6, kDim}});
  grouped.add(0, view_of(queries, 6, kDim));
  single.add(0, view_of(queries, 6, kDim));
  const FilterBank one_each = single.finish({});
  const FilterBank bank = grouped.finish({});
  ASSERT_EQ(bank.layer(0).heads, 2U);
  for (std::size_t k = 0; k < 2; ++k) {
    std::vector<double> mean(kDim);
    double square = 0;
    for (std::size_t d = 0; d < kDim; ++d) {
      for (std::size_t h = 3 * k; h < 3 * k + 3; ++h) {
        mean[d] += double{one_each.layer(0).head(h)[d]} / 3;
      }
      square += mean[d] * mean[d];
    }
    for (double& x : mean) {
      x /= std::sqrt(square);
    }
    expect_near(bank.layer(0).head(k), mean);
  }
}

TEST(CalibratorTest, GivesZeroForQueryHeadsThatOppose) {
  auto queries = random_queries(1, 40, 8, 5);
  const std::size_t size = queries.size();
  for (std::size_t i = 0; i < size; ++i) {
    queries.push_back(-queries[i]);
  }
  Calibrator calibrator({{2, 1, 8}});
  calibrator.add(0, view_of(queries, 2, 8));
  EXPECT_EQ(calibrator.finish({}).layer(0).values, std::vector<float>(8));
}

TEST(CalibratorTest, GivesTheSameFiltersHoweverTheTextIsCut) {
  constexpr std::size_t kTokens = 150;
  constexpr std::size_t kDim = 32;
  const auto queries = random_queries(2, kTokens, kDim, 13);
  Calibrator whole({{2, 2, kDim}});
  whole.add(0, view_of(queries, 2, kDim));
  const FilterBank expected = whole.finish({});
  for (const std::size_t chunk : {1U, 7U, 64U, 100U}) {
    SCOPED_TRACE(chunk);
    Calibrator calibrator({{2, 2, kDim}});
    for (std::size_t t = 0; t < kTokens; t += chunk) {
      TensorView view = view_of(queries, 2, kDim);
      view.data = view.row(0, 0, t);
      view.tokens = std::min(chunk, kTokens - t);
      calibrator.add(0, view);
    }
    const FilterBank bank = calibrator.finish({});
    EXPECT_EQ(calibrator.rows(0), kTokens);
    for (std::size_t h = 0; h < 2; ++h) {
      const auto head = expected.layer(0).head(h);
      expect_near(bank.layer(0).head(h), {head.begin(), head.end()});
    }
  }
}

TEST(CalibratorTest, GivesTheSameBytesForTheSameQueries) {
  const auto queries = random_queries(3, 300, 64, 17);
  Calibrator first({{3, 1, 64}});
  Calibrator second({{3, 1, 64}});
  first.add(0, view_of(queries, 3, 64));
  second.add(0, view_of(queries, 3, 64));
  EXPECT_EQ(first.finish({}).fingerprint(), second.finish({}).fingerprint());
}

TEST(CalibratorTest, ReadsStridedQueriesOfAllBatches) {
  constexpr std::size_t kDim = 5;
  constexpr std::size_t kTokens = 12;
  const auto queries = random_queries(2, 2 * kTokens, kDim, 19);
  Calibrator dense({{2, 2, kDim}});
  dense.add(0, view_of(queries, 2, kDim));
  // The same rows as [batch, token, head, dim] with padding, as llama.cpp
  // holds them.
  constexpr std::size_t kRow = 8;
  std::vector<float> padded(2 * kTokens * 2 * kRow, 1e30F);
  TensorView view{padded.data(), DType::kFloat32, 2, 2, kTokens, kDim};
  view.batch_stride = kTokens * 2 * kRow;
  view.head_stride = kRow;
  view.token_stride = 2 * kRow;
  for (std::size_t h = 0; h < 2; ++h) {
    for (std::size_t t = 0; t < 2 * kTokens; ++t) {
      std::copy_n(
          queries.data() + (h * 2 * kTokens + t) * kDim,
          kDim,
          padded.data() + (t * 2 + h) * kRow);
    }
  }
  Calibrator strided({{2, 2, kDim}});
  strided.add(0, view);
  EXPECT_EQ(strided.rows(0), 2 * kTokens);
  for (std::size_t h = 0; h < 2; ++h) {
    const FilterBank expected = dense.finish({});
    const auto head = expected.layer(0).head(h);
    expect_near(
        strided.finish({}).layer(0).head(h), {head.begin(), head.end()});
  }
}

TEST(CalibratorTest, MergesWhatAnotherHasSeen) {
  constexpr std::size_t kDim = 24;
  const auto early = random_queries(2, 40, kDim, 23);
  const auto late = random_queries(2, 70, kDim, 29);
  Calibrator all({{2, 2, kDim}});
  Calibrator first({{2, 2, kDim}});
  Calibrator second({{2, 2, kDim}});
  all.add(0, view_of(early, 2, kDim));
  all.add(0, view_of(late, 2, kDim));
  first.add(0, view_of(early, 2, kDim));
  second.add(0, view_of(late, 2, kDim));
  first.merge(second);
  EXPECT_EQ(first.rows(0), 110U);
  EXPECT_EQ(second.rows(0), 70U);
  const FilterBank expected = all.finish({});
  const FilterBank merged = first.finish({});
  for (std::size_t h = 0; h < 2; ++h) {
    const auto head = expected.layer(0).head(h);
    expect_near(merged.layer(0).head(h), {head.begin(), head.end()});
  }
}

TEST(CalibratorTest, KeepsLayersApart) {
  const auto first = random_queries(2, 20, 4, 31);
  const auto second = random_queries(4, 30, 8, 37);
  Calibrator calibrator({{2, 2, 4}, {4, 1, 8}});
  calibrator.add(0, view_of(first, 2, 4));
  calibrator.add(1, view_of(second, 4, 8));
  Calibrator alone({{4, 1, 8}});
  alone.add(0, view_of(second, 4, 8));
  const FilterBank bank = calibrator.finish({});
  EXPECT_EQ(bank.layers(), 2U);
  EXPECT_EQ(bank.layer(1), alone.finish({}).layer(0));
}

TEST(CalibratorTest, RecordsTheSmallestNumberOfRows) {
  Calibrator calibrator({{1, 1, 4}, {1, 1, 4}});
  calibrator.add(0, view_of(random_queries(1, 20, 4, 41), 1, 4));
  calibrator.add(1, view_of(random_queries(1, 30, 4, 43), 1, 4));
  FilterMetadata metadata;
  metadata.model_id = "a model";
  metadata.n_samples = 999;
  const FilterBank bank = calibrator.finish(metadata);
  EXPECT_EQ(bank.metadata().n_samples, 20U);
  EXPECT_EQ(bank.metadata().model_id, "a model");
}

TEST(CalibratorTest, KeepsTheDirectionOfVerySmallAndLargeQueries) {
  for (const float scale : {1e-44F, 1e-20F, 1e20F, 1e37F}) {
    SCOPED_TRACE(scale);
    const std::vector<float> queries = {0, scale, 0, scale};
    Calibrator calibrator({{1, 1, 2}});
    calibrator.add(0, view_of(queries, 1, 2));
    expect_near(calibrator.finish({}).layer(0).head(0), {0, 1});
  }
}

TEST(CalibratorTest, AcceptsNoTokens) {
  Calibrator calibrator({{1, 1, 2}});
  calibrator.add(0, view_of({}, 1, 2));
  EXPECT_EQ(calibrator.rows(0), 0U);
}

TEST(CalibratorTest, RejectsLayersThatCannotBe) {
  const std::vector<std::vector<QueryShape>> wrong = {
      {},
      {{0, 1, 4}},
      {{1, 0, 4}},
      {{1, 1, 0}},
      {{3, 2, 4}},
      {{1, 2, 4}},
      {{2, 1, 4}, {3, 2, 4}}};
  for (const auto& layers : wrong) {
    EXPECT_EQ(
        kind_of([&] { const Calibrator calibrator(layers); }),
        ErrorKind::kInvalidArgument);
  }
}

TEST(CalibratorTest, RejectsALayerThatDoesNotExist) {
  Calibrator calibrator({{1, 1, 2}});
  const std::vector<float> queries = {1, 2};
  EXPECT_EQ(
      kind_of([&] { calibrator.add(1, view_of(queries, 1, 2)); }),
      ErrorKind::kInvalidArgument);
  EXPECT_EQ(
      kind_of([&] { static_cast<void>(calibrator.rows(1)); }),
      ErrorKind::kInvalidArgument);
}

TEST(CalibratorTest, RejectsOtherShapesAndTypes) {
  Calibrator calibrator({{2, 1, 4}});
  const std::vector<float> data(64);
  const auto add = [&](DType dtype, std::size_t heads, std::size_t dim) {
    return kind_of([&] {
      calibrator.add(
          0, TensorView::dense(data.data(), dtype, 1, heads, 2, dim));
    });
  };
  EXPECT_EQ(add(DType::kFloat32, 1, 4), ErrorKind::kShape);
  EXPECT_EQ(add(DType::kFloat32, 2, 3), ErrorKind::kShape);
  EXPECT_EQ(add(DType::kFloat16, 2, 4), ErrorKind::kShape);
  EXPECT_EQ(add(DType::kBFloat16, 2, 4), ErrorKind::kShape);
  EXPECT_EQ(calibrator.rows(0), 0U);
}

TEST(CalibratorTest, AddsNothingOfQueriesWithANonFiniteValue) {
  const auto good = random_queries(2, 10, 4, 47);
  Calibrator calibrator({{2, 2, 4}});
  calibrator.add(0, view_of(good, 2, 4));
  const FilterBank before = calibrator.finish({});
  using Limits = std::numeric_limits<float>;
  for (const float value :
       {Limits::quiet_NaN(), Limits::infinity(), -Limits::infinity()}) {
    auto bad = random_queries(2, 10, 4, 53);
    bad.back() = value;
    try {
      calibrator.add(0, view_of(bad, 2, 4));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr("head=1 token=9"));
    }
    EXPECT_EQ(calibrator.finish({}), before);
  }
}

TEST(CalibratorTest, MergesNothingFromOtherShapes) {
  const auto queries = random_queries(2, 10, 4, 59);
  Calibrator calibrator({{2, 1, 4}, {2, 1, 4}});
  calibrator.add(0, view_of(queries, 2, 4));
  calibrator.add(1, view_of(queries, 2, 4));
  const FilterBank before = calibrator.finish({});
  const std::vector<std::vector<QueryShape>> wrong = {
      {{2, 1, 4}}, {{2, 1, 4}, {2, 2, 4}}, {{2, 1, 4}, {2, 1, 5}}};
  for (const auto& layers : wrong) {
    Calibrator other(layers);
    other.add(0, view_of(queries, 2, 4));
    EXPECT_EQ(kind_of([&] { calibrator.merge(other); }), ErrorKind::kShape);
    EXPECT_EQ(calibrator.finish({}), before);
  }
}

TEST(CalibratorTest, NeedsTwoRowsInEveryLayer) {
  Calibrator calibrator({{1, 1, 2}, {1, 1, 2}});
  const std::vector<float> queries = {1, 2};
  calibrator.add(0, view_of(queries, 1, 2));
  calibrator.add(0, view_of(queries, 1, 2));
  calibrator.add(1, view_of(queries, 1, 2));
  try {
    static_cast<void>(calibrator.finish({}));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("layer 1"));
    EXPECT_THAT(error.what(), HasSubstr("rows=1"));
  }
}

}  // namespace
}  // namespace qfilters
