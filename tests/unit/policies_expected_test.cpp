// Expected Attention against a slow direct computation.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <memory>
#include <numbers>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/isa.h"
#include "qfilters/query_statistics.h"
#include "qfilters/sequence_cache.h"

#include "policies/registry.h"
#include "policies/scorers.h"
#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters::policies {
namespace {

using test::budget;
using test::error_of;
using test::IsError;
using test::Model;

constexpr std::size_t kDim = 6;
constexpr std::size_t kValueDim = 8;
constexpr std::size_t kQueries = 3;

// Pairs (0, 2) and (1, 3); 4 and 5 do not turn.
Rotation rotation() {
  return {{-1.0F, -0.3F, 1.0F, 0.3F, 0, 0}, {2, 3, 0, 1, 4, 5}};
}

std::shared_ptr<const FilterBank> bank(Rotation turns = rotation()) {
  QueryStatistics statistics(
      {{{2 * kQueries, 2, kDim}, std::move(turns), 0.4F}});
  std::mt19937 random(3);
  std::normal_distribution<float> of(0.2F, 1.0F);
  std::vector<float> rows(2 * kQueries * 50 * kDim);
  for (float& x : rows)
    x = of(random);
  statistics.add(
      0,
      TensorView::dense(
          rows.data(), DType::kFloat32, 1, 2 * kQueries, 50, kDim),
      0);
  return std::make_shared<const FilterBank>(statistics.finish({}));
}

using Matrix = std::vector<std::vector<double>>;

// R of one position, added up over those to come and divided.
Matrix mean_rotation(
    std::span<const float> statistics, int first, std::size_t future) {
  Matrix out(kDim, std::vector<double>(kDim));
  for (std::size_t i = 0; i < future; ++i) {
    const double p = first + static_cast<double>(i);
    for (std::size_t d = 0; d < kDim; ++d) {
      out[d][d] += std::cos(statistics[d] * p) / double(future);
      out[d][std::size_t(statistics[kDim + d])] +=
          std::sin(statistics[d] * p) / double(future);
    }
  }
  return out;
}

// mean . k + k^T S k / 2 with the mean and S of a query head turned by R.
double logit(
    const Matrix& turn,
    std::span<const float> query,
    const std::vector<float>& key) {
  const auto covariance = [&](std::size_t i, std::size_t j) {
    const std::size_t a = std::max(i, j);
    return double{query[kDim + a * (a + 1) / 2 + std::min(i, j)]};
  };
  // R^T k, so that S need not be turned.
  std::vector<double> k(kDim);
  for (std::size_t i = 0; i < kDim; ++i) {
    for (std::size_t j = 0; j < kDim; ++j)
      k[j] += turn[i][j] * key[i];
  }
  double sum = 0;
  for (std::size_t i = 0; i < kDim; ++i) {
    sum += query[i] * k[i];
    for (std::size_t j = 0; j < kDim; ++j)
      sum += k[i] * covariance(i, j) * k[j] / 2;
  }
  return sum;
}

struct Row {
  int position = 0;
  std::vector<float> key;
  double norm = 0;
};

std::vector<Row> rows_of(const RowsView& view, std::size_t group) {
  std::vector<Row> out;
  std::vector<std::uint16_t> key(kDim);
  std::vector<std::uint16_t> value(kValueDim);
  for (std::size_t r = 0; r < view.rows(group); ++r) {
    view.read_key(group, r, key.data());
    view.read_value(group, r, value.data());
    Row row{view.position(group, r), {}, 0};
    for (const auto x : key)
      row.key.push_back(test::decode(view.shape().dtype, x));
    for (const auto x : value)
      row.norm += std::pow(test::decode(view.shape().dtype, x), 2);
    row.norm = std::sqrt(row.norm);
    out.push_back(row);
  }
  return out;
}

std::vector<double> expected_of(
    const std::vector<Row>& rows,
    std::span<const float> statistics,
    int present,
    const ExpectedOptions& options) {
  std::vector<double> scores(rows.size());
  const Matrix turn = mean_rotation(statistics, present, options.future);
  for (std::size_t q = 0; q < kQueries; ++q) {
    const auto query = statistics.subspan(2 * kDim + q * (kDim + 21));
    double sum = 0;
    for (const Row& row : rows) {
      if (row.position >= int(options.sinks))
        sum += std::exp(logit(turn, query, row.key));
    }
    for (std::size_t r = 0; r < rows.size(); ++r) {
      if (rows[r].position >= int(options.sinks))
        scores[r] += std::exp(logit(turn, query, rows[r].key)) / sum / kQueries;
    }
  }
  for (std::size_t r = 0; r < rows.size(); ++r)
    scores[r] = (scores[r] + options.epsilon) * rows[r].norm;
  return scores;
}

std::vector<float> rescored(
    const Scorer& scorer, const RowsView& rows, std::size_t group) {
  std::vector<float> scores(rows.rows(group), test::kNaN);
  scorer.rescore({0, group / 2, group % 2, rows}, scores);
  return scores;
}

TEST(ExpectedTest, IsWhatAQueryToComePaysOnAverageTimesTheValuesNorm) {
  const auto filters = bank();
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const Model model({{2, kDim, kValueDim, 0}}, 2, dtype);
    for (const std::size_t stored : {0U, 64U, 100U}) {
      for (const ExpectedOptions& options :
           {ExpectedOptions{},
            ExpectedOptions{1, 0, 0},
            ExpectedOptions{7, 9, 0.02F}}) {
        SequenceCache cache(
            model.layers,
            Policy::make("random", budget(std::max(stored, 1UL), 0, 0)),
            model.options());
        if (stored > 0) model.feed(cache, {stored + 30});
        model.append(cache, 17);
        const int present = stored > 0 ? int(stored) + 47 : 17;
        const auto scorer = make_expected_scorer(filters, options);
        for (std::size_t g = 0; g < 4; ++g) {
          const auto rows = rows_of(cache.rows(0), g);
          const auto got = rescored(*scorer, cache.rows(0), g);
          const auto want = expected_of(
              rows, filters->layer(0).head(g % 2), present, options);
          const float most = *std::ranges::max_element(got);
          for (std::size_t r = 0; r < rows.size(); ++r) {
            if (rows[r].position < int(options.sinks)) {
              ASSERT_EQ(got[r], most) << "sinks are never last";
            } else {
              ASSERT_NEAR(got[r], want[r], 1e-5 + 1e-4 * want[r]) << r;
            }
          }
        }
      }
    }
  }
}

TEST(ExpectedTest, AveragesRotationsThatComeFullCircle) {
  Rotation turns = rotation();
  const auto circle = static_cast<float>(2 * std::numbers::pi);
  turns.angle = {-circle, -2 * circle, circle, 2 * circle, 0, 0};
  const Model model({{2, kDim, kValueDim, 0}});
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.append(cache, 40);
  const auto filters = bank(turns);
  const auto got = rescored(*make_expected_scorer(filters), cache.rows(0), 0);
  const auto want =
      expected_of(rows_of(cache.rows(0), 0), filters->layer(0).head(0), 40, {});
  for (std::size_t r = 4; r < 40; ++r)
    ASSERT_NEAR(got[r], want[r], 1e-5 + 1e-4 * want[r]) << r;
}

TEST(ExpectedTest, HasTheSameBitsOnEveryInstructionSet) {
  const Model model({{2, kDim, kValueDim, 0}});
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.feed(cache, {150});
  model.append(cache, 23);
  const auto scorer = make_expected_scorer(bank());
  const std::string before = active_isa();
  const auto want = test::bits_of(rescored(*scorer, cache.rows(0), 1));
  for (const auto& isa : runnable_isas()) {
    set_isa(isa);
    EXPECT_EQ(test::bits_of(rescored(*scorer, cache.rows(0), 1)), want) << isa;
  }
  set_isa(before);
}

TEST(ExpectedTest, RowsThatAreAllSinksAreWorthNothingMore) {
  const Model model({{2, kDim, kValueDim, 0}});
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.append(cache, 3);
  const auto scorer = make_expected_scorer(bank());
  EXPECT_THAT(rescored(*scorer, cache.rows(0), 0), ::testing::Each(0.0F));
}

TEST(ExpectedTest, ThePolicyHoldsItsBudgetAndLeavesItsSinksOut) {
  const Model model({{2, kDim, kValueDim, 0}});
  const Policy policy = make("expected", budget(20, 3, 0), bank());
  EXPECT_FALSE(policy.scorer()->frozen());
  EXPECT_THAT(policy.scorer()->identity(), ::testing::HasSubstr("sinks 3"));
  SequenceCache cache(model.layers, policy, model.options());
  model.feed(cache, {30, 1, 25});
  EXPECT_EQ(cache.store(0).rows(0), 20U);
  EXPECT_EQ(cache.store(0).positions(1)[2], 2);
}

TEST(ExpectedTest, RefusesFiltersOfAnotherKindOrModel) {
  EXPECT_THAT(
      error_of([] { (void)make_expected_scorer(nullptr); }),
      IsError(ErrorKind::kInvalidArgument, "no filters"));
  EXPECT_THAT(
      error_of([] { (void)make_expected_scorer(bank(), {.future = 0}); }),
      IsError(ErrorKind::kInvalidArgument, "future=0"));
  const auto scorer = make_expected_scorer(bank());
  EXPECT_NO_THROW(scorer->check_layer(0, 2, kDim));
  for (const auto [layer, heads, dim] :
       {std::array<std::size_t, 3>{1, 2, kDim}, {0, 3, kDim}, {0, 2, 7}}) {
    EXPECT_THAT(
        error_of([&] { scorer->check_layer(layer, heads, dim); }),
        IsError(ErrorKind::kMismatch, "needs statistics for"));
  }
  LayerFilters bad = bank()->layer(0);
  bad.values[kDim] = kDim;  // a partner that is no dimension
  const auto wild = std::make_shared<const FilterBank>(
      std::vector<LayerFilters>{bad}, FilterMetadata{});
  EXPECT_THAT(
      error_of([&] { make_expected_scorer(wild)->check_layer(0, 2, kDim); }),
      IsError(ErrorKind::kMismatch, "needs statistics for"));
}

}  // namespace
}  // namespace qfilters::policies
