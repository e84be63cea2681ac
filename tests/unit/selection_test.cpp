#include "qfilters/selection.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "qfilters/error.h"

#include "unit/test_util.h"

namespace qfilters {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using test::error_of;
using test::IsError;
using test::kInfinity;
using test::kNaN;

constexpr Protection kNone{.sinks = 0, .recent = 0};
// The same cases in every run, unless the caller chooses.
const int kSeeded = setenv("RC_PARAMS", "seed=1 max_success=1000", 0);

TEST(SelectionTest, ProtectsFourSinksAndNoRecentRowsByDefault) {
  EXPECT_EQ(Protection(), (Protection{.sinks = 4, .recent = 0}));
}

TEST(SelectionTest, KeepsTheLargestScoresInRowOrder) {
  const std::vector<float> scores = {0.5F, -1.0F, 3.0F, 2.0F, 0.0F};
  EXPECT_THAT(select_rows(scores, 3, kNone), ElementsAre(0, 2, 3));
}

TEST(SelectionTest, KeepsEveryRowWhenTheBudgetIsEnough) {
  const std::vector<float> scores = {kNaN, 1.0F, -kInfinity};
  EXPECT_THAT(select_rows(scores, 3, kNone), ElementsAre(0, 1, 2));
}

TEST(SelectionTest, KeepsNothingOfNothing) {
  EXPECT_THAT(select_rows({}, 0, Protection{4, 32}), IsEmpty());
  EXPECT_THAT(select_rows(std::vector<float>{1.0F}, 0, kNone), IsEmpty());
}

TEST(SelectionTest, BreaksTiesTowardsTheNewerRow) {
  const std::vector<float> scores = {7.0F, 1.0F, 1.0F, 1.0F, 0.0F};
  EXPECT_THAT(select_rows(scores, 3, kNone), ElementsAre(0, 2, 3));
}

TEST(SelectionTest, KeepsSinksAndTheNewestRowsOfAConstantStream) {
  const std::vector<float> scores(9, -2.5F);
  EXPECT_THAT(
      select_rows(scores, 4, Protection{1, 0}), ElementsAre(0, 6, 7, 8));
}

TEST(SelectionTest, TakesNegativeAndPositiveZeroAsEqual) {
  const std::vector<float> scores = {0.0F, -0.0F, 0.0F, -0.0F};
  EXPECT_THAT(select_rows(scores, 2, kNone), ElementsAre(2, 3));
}

TEST(SelectionTest, EvictsNaNBeforeEveryNumber) {
  const std::vector<float> scores = {-kInfinity, kNaN, -kNaN, -1e38F, kNaN};
  EXPECT_THAT(select_rows(scores, 2, kNone), ElementsAre(0, 3));
  // Among NaN the newer row stays, whatever sign and payload.
  EXPECT_THAT(select_rows(scores, 3, kNone), ElementsAre(0, 3, 4));
  EXPECT_THAT(select_rows(scores, 4, kNone), ElementsAre(0, 2, 3, 4));
}

TEST(SelectionTest, OrdersInfinitiesAsNumbers) {
  const float max = std::numeric_limits<float>::max();
  const std::vector<float> scores = {kInfinity, max, kInfinity, -kInfinity};
  EXPECT_THAT(select_rows(scores, 1, kNone), ElementsAre(2));
  EXPECT_THAT(select_rows(scores, 2, kNone), ElementsAre(0, 2));
  EXPECT_THAT(select_rows(scores, 3, kNone), ElementsAre(0, 1, 2));
}

TEST(SelectionTest, TellsSubnormalScoresApart) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  const std::vector<float> scores = {2 * tiny, tiny, -tiny, 0.0F};
  EXPECT_THAT(select_rows(scores, 3, kNone), ElementsAre(0, 1, 3));
}

TEST(SelectionTest, KeepsSinksEvenWhenTheyScoreLowest) {
  const std::vector<float> scores = {kNaN, -kInfinity, 1.0F, 2.0F, 3.0F};
  EXPECT_THAT(select_rows(scores, 3, Protection{2, 0}), ElementsAre(0, 1, 4));
}

TEST(SelectionTest, KeepsRecentRowsEvenWhenTheyScoreLowest) {
  const std::vector<float> scores = {3.0F, 2.0F, 1.0F, kNaN, -kInfinity};
  EXPECT_THAT(select_rows(scores, 3, Protection{0, 2}), ElementsAre(0, 3, 4));
}

TEST(SelectionTest, NeverEvictsASinkForAnInfiniteScore) {
  const std::vector<float> scores = {0.0F, kInfinity, kInfinity, kInfinity};
  EXPECT_THAT(select_rows(scores, 2, Protection{1, 0}), ElementsAre(0, 3));
}

TEST(SelectionTest, KeepsOnlyProtectedRowsWhenTheyFillTheBudget) {
  const std::vector<float> scores = {0.0F, 9.0F, 8.0F, 7.0F, 0.0F};
  EXPECT_THAT(select_rows(scores, 3, Protection{2, 1}), ElementsAre(0, 1, 4));
}

TEST(SelectionTest, CountsRowsThatAreSinkAndRecentOnce) {
  const std::vector<float> scores = {1.0F, 2.0F, 3.0F};
  EXPECT_THAT(select_rows(scores, 3, Protection{2, 2}), ElementsAre(0, 1, 2));
}

TEST(SelectionTest, DoesNotWrapAroundHugeProtection) {
  constexpr std::size_t kHuge = std::numeric_limits<std::size_t>::max();
  const std::vector<float> scores = {1.0F, 2.0F};
  EXPECT_THAT(
      select_rows(scores, 2, Protection{kHuge, kHuge}), ElementsAre(0, 1));
}

TEST(SelectionTest, RejectsMoreRowsThanThereAre) {
  const std::vector<float> scores(4);
  EXPECT_THAT(
      error_of([&] { static_cast<void>(select_rows(scores, 5, kNone)); }),
      IsError(ErrorKind::kInvalidArgument, "keep=5"));
}

TEST(SelectionTest, RejectsFewerRowsThanAreProtected) {
  const std::vector<float> scores(8);
  EXPECT_THAT(
      error_of([&] {
        static_cast<void>(select_rows(scores, 4, Protection{3, 2}));
      }),
      IsError(ErrorKind::kInvalidArgument, "sinks+recent=5"));
}

// A head with a score for each row, few distinct values, so that ties are
// common, and a budget that fits.
struct Head {
  std::vector<float> scores;
  Protection protection;
  std::size_t keep = 0;
};

Head any_head() {
  const auto score = rc::gen::weightedOneOf<float>({
      {6,
       rc::gen::map(
           rc::gen::inRange(-3, 4),
           [](int x) { return static_cast<float>(x) / 2; })},
      {1, rc::gen::element(kNaN, -kNaN, kInfinity, -kInfinity, 0.0F, -0.0F)},
      {3,
       rc::gen::map(
           rc::gen::arbitrary<std::uint32_t>(),
           [](std::uint32_t x) { return std::bit_cast<float>(x); })},
  });
  Head head;
  head.scores = *rc::gen::container<std::vector<float>>(score);
  const std::size_t rows = head.scores.size();
  head.protection.sinks = *rc::gen::inRange<std::size_t>(0, 6);
  head.protection.recent = *rc::gen::inRange<std::size_t>(0, 6);
  const std::size_t sinks = std::min(head.protection.sinks, rows);
  const std::size_t recent = std::min(head.protection.recent, rows - sinks);
  head.keep = *rc::gen::inRange<std::size_t>(sinks + recent, rows + 1);
  return head;
}

RC_GTEST_PROP(SelectionTest, GivesAscendingUniqueRows, ()) {
  const Head head = any_head();
  const auto kept = select_rows(head.scores, head.keep, head.protection);
  RC_ASSERT(kept.size() == head.keep);
  for (std::size_t i = 1; i < kept.size(); ++i) {
    RC_ASSERT(kept[i - 1] < kept[i]);
  }
  if (!kept.empty()) RC_ASSERT(kept.back() < head.scores.size());
}

RC_GTEST_PROP(SelectionTest, NeverKeepsAWorseRowThanItEvicts, ()) {
  const Head head = any_head();
  const auto& scores = head.scores;
  const auto kept = select_rows(scores, head.keep, head.protection);
  std::vector<bool> stays(scores.size());
  for (const std::uint32_t row : kept) {
    stays[row] = true;
  }
  const auto worse = [&](std::size_t a, std::size_t b) {
    if (std::isnan(scores[a])) return !std::isnan(scores[b]) || a < b;
    return scores[a] < scores[b] || (scores[a] == scores[b] && a < b);
  };
  const std::size_t recent = std::min(head.protection.recent, scores.size());
  for (std::size_t a = 0; a < scores.size(); ++a) {
    const bool is_protected =
        a < head.protection.sinks || a >= scores.size() - recent;
    if (is_protected) RC_ASSERT(stays[a]);
    if (is_protected || !stays[a]) continue;
    for (std::size_t b = 0; b < scores.size(); ++b) {
      if (!stays[b]) RC_ASSERT(!worse(a, b));
    }
  }
}

RC_GTEST_PROP(SelectionTest, AgreesWithAPlainSort, ()) {
  const Head head = any_head();
  RC_ASSERT(
      select_rows(head.scores, head.keep, head.protection) ==
      test::reference_selection(head.scores, head.keep, head.protection));
}

RC_GTEST_PROP(SelectionTest, KeepsTheSameRowsWhenRowsArriveInSteps, ()) {
  const Head head = any_head();
  const std::size_t rows = head.scores.size();
  const auto& protection = head.protection;
  RC_PRE(head.keep >= protection.sinks + protection.recent);
  const auto at_once = select_rows(head.scores, head.keep, protection);
  const auto step = *rc::gen::inRange<std::size_t>(1, 6);
  std::vector<std::uint32_t> held;
  for (std::size_t first = 0; first < rows; first += step) {
    for (std::size_t i = first; i < std::min(first + step, rows); ++i) {
      held.push_back(static_cast<std::uint32_t>(i));
    }
    std::vector<float> scores;
    scores.reserve(held.size());
    for (const std::uint32_t row : held) {
      scores.push_back(head.scores[row]);
    }
    const std::size_t keep = std::min(head.keep, held.size());
    std::vector<std::uint32_t> kept;
    for (const std::uint32_t i : select_rows(scores, keep, protection)) {
      kept.push_back(held[i]);
    }
    held = kept;
  }
  RC_ASSERT(held == at_once);
}

std::vector<std::vector<std::uint32_t>> shared(
    const std::vector<std::vector<float>>& scores,
    std::size_t keep,
    std::size_t least,
    const Protection& protection) {
  std::vector<std::vector<std::uint32_t>> kept(scores.size());
  std::vector<SharingHead> heads;
  for (std::size_t h = 0; h < scores.size(); ++h)
    heads.push_back({scores[h], &kept[h]});
  select_shared(heads, keep, least, protection);
  return kept;
}

TEST(SelectionTest, SharesABudgetAmongTheBestRowsOfAllHeads) {
  EXPECT_THAT(
      shared({{1, 9, 8, 7}, {2, 3, 10, 4}}, 4, 0, kNone),
      ElementsAre(ElementsAre(1, 2, 3), ElementsAre(2)));
}

TEST(SelectionTest, LeavesEveryHeadAtLeastSomeOfASharedBudget) {
  EXPECT_THAT(
      shared({{5, 9, 8, 7}, {2, 3, 1, 0}}, 5, 2, kNone),
      ElementsAre(ElementsAre(1, 2, 3), ElementsAre(0, 1)));
  // A head of fewer rows keeps all of them.
  EXPECT_THAT(
      shared({{5, 9, 8, 7}, {kNaN}}, 3, 2, kNone),
      ElementsAre(ElementsAre(1, 2), ElementsAre(0)));
}

TEST(SelectionTest, GivesTiesOfASharedBudgetToTheNewerRowThenTheFirstHead) {
  EXPECT_THAT(
      shared({{1, 1, 1}, {1, 1, 1}, {1, 1, 1}}, 5, 0, kNone),
      ElementsAre(ElementsAre(1, 2), ElementsAre(1, 2), ElementsAre(2)));
  EXPECT_THAT(
      shared({{kNaN}, {kNaN}}, 1, 0, kNone),
      ElementsAre(ElementsAre(0), IsEmpty()));
}

TEST(SelectionTest, RefusesASharedBudgetThatCannotBe) {
  const auto refused = [](std::size_t keep, std::size_t least) {
    return error_of([&] {
      static_cast<void>(
          shared({{1, 2, 3}, {4, 5}}, keep, least, Protection{1, 1}));
    });
  };
  EXPECT_THAT(refused(6, 0), IsError(ErrorKind::kInvalidArgument, "rows=5"));
  EXPECT_THAT(refused(3, 0), IsError(ErrorKind::kInvalidArgument, "between 4"));
  EXPECT_THAT(refused(4, 3), IsError(ErrorKind::kInvalidArgument, "between 5"));
}

// One head is select_rows(); of several, no row that goes may beat one that
// stays for its score.
RC_GTEST_PROP(SelectionPropertyTest, SharesByTheOneOrderOfRows, ()) {
  const Protection protection{
      *rc::gen::inRange<std::size_t>(0, 3),
      *rc::gen::inRange<std::size_t>(0, 3)};
  std::vector<std::vector<float>> scores(*rc::gen::inRange(1, 5));
  std::size_t rows = 0;
  std::size_t must = 0;
  const auto least = *rc::gen::inRange<std::size_t>(0, 8);
  for (auto& head : scores) {
    head = *rc::gen::container<std::vector<float>>(rc::gen::element(
        -1.0F, -0.0F, 0.0F, 1.0F, kInfinity, kNaN, 0.5F, 3.0F));
    rows += head.size();
    must += std::min(
        head.size(), std::max(least, protection.sinks + protection.recent));
  }
  const auto keep = *rc::gen::inRange<std::size_t>(must, rows + 1);
  const auto kept = shared(scores, keep, least, protection);
  std::size_t total = 0;
  // (score or its place, index, head): the order, larger first.
  const auto rank = [&](std::size_t h, std::size_t i) {
    const float score = scores[h][i];
    return std::tuple(
        std::isnan(score) ? -kInfinity : score + 0.0F,
        !std::isnan(score),
        i,
        scores.size() - h);
  };
  for (std::size_t h = 0; h < scores.size(); ++h) {
    total += kept[h].size();
    const std::size_t n = scores[h].size();
    RC_ASSERT(kept[h].size() >= std::min(least, n));
    // Within a head it is the selection of as many rows.
    RC_ASSERT(kept[h] == select_rows(scores[h], kept[h].size(), protection));
  }
  RC_ASSERT(total == keep);
  for (std::size_t a = 0; a < scores.size(); ++a) {
    const std::size_t floor = std::max(
        std::min(least, scores[a].size()),
        std::min(scores[a].size(), protection.sinks + protection.recent));
    if (kept[a].size() <= floor) continue;
    // The worst row that `a` chose to keep beyond what it must.
    auto worst =
        std::tuple(kInfinity, true, scores[a].size(), scores.size() + 1);
    for (const std::uint32_t i : kept[a]) {
      if (i < protection.sinks || i + protection.recent >= scores[a].size())
        continue;
      worst = std::min(worst, rank(a, i));
    }
    for (std::size_t b = 0; b < scores.size(); ++b) {
      for (std::size_t i = 0; i < scores[b].size(); ++i) {
        const bool stays =
            std::binary_search(kept[b].begin(), kept[b].end(), i);
        RC_ASSERT(stays || rank(b, i) < worst);
      }
    }
  }
}

}  // namespace
}  // namespace qfilters
