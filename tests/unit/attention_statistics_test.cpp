// What attention tells of its probabilities.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/attention.h"

#include "unit/attention_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using ::testing::Each;

using Call = test::AttentionCall;
using Case = test::AttentionCase;
using Kind = AttentionStatistics::Kind;
using Rows = std::vector<std::vector<float>>;

using test::bits_of;

Rows statistics_of(
    const Call& call, Kind kind, std::size_t last_queries, int threads = 1) {
  AttentionStatistics out;
  out.kind = kind;
  out.last_queries = last_queries;
  out.rows = {{test::kNaN}, {}, {1.0F, 2.0F}};  // from an earlier call
  (void)call.run(threads, &out);
  return out.rows;
}

// The same in float64, and what float32 may differ by.
void expect_agreement(
    Call& call, const Case& c, Kind kind, std::size_t last_queries) {
  const Rows got = statistics_of(call, kind, last_queries);
  const RowsView rows = call.rows();
  ASSERT_EQ(got.size(), rows.shape().groups());
  const std::size_t wanted =
      last_queries == 0 ? c.tokens : std::min(last_queries, c.tokens);
  for (std::size_t g = 0; g < got.size(); ++g) {
    ASSERT_EQ(got[g].size(), rows.rows(g));
    std::vector<double> want(got[g].size());
    double relative = 0;
    for (std::size_t t = c.tokens - wanted; t < c.tokens; ++t) {
      for (std::size_t h = 0; h < c.share; ++h) {
        const std::size_t head = g % c.kv_heads * c.share + h;
        const auto seen = test::reference_weights(
            call.queries().row(g / c.kv_heads, head, t),
            rows,
            g,
            t,
            call.reference());
        relative = std::max(relative, seen.relative);
        for (std::size_t i = 0; i < seen.rows.size(); ++i) {
          double& row = want[seen.rows[i]];
          row = kind == Kind::kSum ? row + seen.weights[i]
                                   : std::max(row, seen.weights[i]);
        }
      }
    }
    // A sum of n terms that are not negative adds less than n units.
    const auto terms = static_cast<double>(wanted * c.share);
    for (std::size_t r = 0; r < want.size(); ++r) {
      ASSERT_NEAR(
          got[g][r], want[r], want[r] * (relative + terms * 0x1p-24) + 1e-37)
          << "group " << g << " row " << r;
    }
  }
}

class AttentionStatisticsTest : public ::testing::TestWithParam<Case> {};

TEST_P(AttentionStatisticsTest, AgreesWithFloat64) {
  Call call(GetParam());
  for (const Kind kind : {Kind::kSum, Kind::kMax}) {
    for (const std::size_t last : {0U, 1U, 5U, 100000U}) {
      SCOPED_TRACE(
          (kind == Kind::kSum ? "sum of " : "max of ") + std::to_string(last));
      expect_agreement(call, GetParam(), kind, last);
    }
  }
}

TEST_P(AttentionStatisticsTest, HasTheSameBitsForEveryThreadCount) {
  const Call call(GetParam());
  for (const Kind kind : {Kind::kSum, Kind::kMax}) {
    const Rows one = statistics_of(call, kind, 0, 1);
    for (const int threads : {2, 7}) {
      const Rows many = statistics_of(call, kind, 0, threads);
      ASSERT_EQ(many.size(), one.size());
      for (std::size_t g = 0; g < one.size(); ++g) {
        EXPECT_EQ(bits_of(many[g]), bits_of(one[g])) << "group " << g;
      }
    }
  }
}

TEST_P(AttentionStatisticsTest, ChangesNoBitOfTheOutput) {
  const Call call(GetParam());
  AttentionStatistics statistics;
  EXPECT_EQ(bits_of(call.run(1, &statistics)), bits_of(call.run(1)));
  EXPECT_EQ(bits_of(call.run(2, &statistics)), bits_of(call.run(2)));
}

INSTANTIATE_TEST_SUITE_P(
    Cases,
    AttentionStatisticsTest,
    ::testing::Values(
        Case{},
        Case{.stored = 70, .tokens = 5, .key_dim = 17, .value_dim = 3},
        Case{.stored = 64, .tokens = 64, .kv_heads = 1, .share = 1},
        Case{.stored = 90, .tokens = 20, .dtype = DType::kBFloat16},
        Case{.stored = 30, .tokens = 70, .kv_heads = 1, .share = 9},
        Case{.stored = 70, .tokens = 5, .format = RowFormat::kInt8},
        Case{.stored = 1000, .tokens = 70, .format = RowFormat::kInt8},
        Case{
            .stored = 2100,
            .tokens = 30,
            .dtype = DType::kBFloat16,
            .format = RowFormat::kInt8,
            .ragged = true},
        Case{
            .stored = 1100,
            .tokens = 80,
            .format = RowFormat::kInt8,
            .options = {.soft_cap = 5.0F, .window = 100}},
        Case{.stored = 200, .tokens = 9, .batch = 2, .ragged = true},
        Case{.stored = 2100, .tokens = 30, .kv_heads = 3, .ragged = true},
        Case{.stored = 80, .tokens = 30, .options = {.soft_cap = 1.5F}},
        Case{.stored = 150, .tokens = 80, .options = {.window = 40}},
        Case{.stored = 1100, .tokens = 80, .options = {.window = 100}},
        Case{
            .stored = 1500,
            .tokens = 40,
            .batch = 2,
            .ragged = true,
            .options = {.soft_cap = 5.0F, .window = 900}}),
    [](const auto& c) { return name_of(c.param); });

TEST(AttentionStatisticsTest, OneQuerysProbabilitiesSumToOne) {
  const Call call({.stored = 1500, .tokens = 3, .share = 3});
  for (const auto& rows : statistics_of(call, Kind::kSum, 1)) {
    double sum = 0;
    for (const float p : rows)
      sum += p;
    EXPECT_NEAR(sum, 3.0, 1e-4);
  }
}

TEST(AttentionStatisticsTest, ARowThatNobodySeesIsZero) {
  const Call call({.stored = 200, .tokens = 2, .options = {.window = 70}});
  for (const Kind kind : {Kind::kSum, Kind::kMax}) {
    for (const auto& rows : statistics_of(call, kind, 0)) {
      EXPECT_THAT(std::vector(rows.begin(), rows.begin() + 131), Each(0.0F));
      EXPECT_GT(rows[131], 0.0F);
    }
  }
}

TEST(AttentionStatisticsTest, IsFiniteWhenScoresAreHuge) {
  const Call call({.stored = 70, .tokens = 9, .options = {.scale = 1000.0F}});
  for (const auto& rows : statistics_of(call, Kind::kMax, 0)) {
    for (const float p : rows) {
      EXPECT_GE(p, 0.0F);
      EXPECT_LE(p, 1.0F);
    }
    EXPECT_GT(*std::ranges::max_element(rows), 0.5F);
  }
}

TEST(AttentionStatisticsTest, NoNewRowsCountNothing) {
  const Call call({.stored = 10, .tokens = 0, .kv_heads = 1});
  EXPECT_EQ(statistics_of(call, Kind::kSum, 0), Rows({std::vector<float>(10)}));
}

TEST(AttentionStatisticsTest, ARefusedCallLeavesItAlone) {
  const Call call({.stored = 10, .options = {.soft_cap = -1.0F}});
  AttentionStatistics statistics;
  statistics.rows = {{5.0F}};
  EXPECT_TRUE(test::error_of([&] { (void)call.run(1, &statistics); }));
  EXPECT_EQ(statistics.rows, Rows({{5.0F}}));
}

}  // namespace
}  // namespace qfilters
