#include "qfilters/policy.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"
#include "qfilters/filter_bank.h"

#include "unit/test_util.h"

namespace qfilters {
namespace {

using ::testing::ElementsAre;

using test::error_of;
using test::IsError;

std::shared_ptr<const FilterBank> filters() {
  return std::make_shared<const FilterBank>(
      std::vector<LayerFilters>{{1, 2, {1, 0}}}, FilterMetadata{});
}

PolicyOptions options(
    std::size_t budget,
    std::size_t sinks,
    std::size_t recent,
    std::size_t interval = 0) {
  PolicyOptions out;
  out.budget = budget;
  out.protection = {sinks, recent};
  out.interval = interval;
  return out;
}

TEST(PolicyTest, KnowsItsNamesInDocumentedOrder) {
  const auto names = Policy::names();
  EXPECT_THAT(
      std::vector<std::string_view>(names.begin(), names.end()),
      ElementsAre("full", "auto", "qfilters", "streaming", "knorm", "random"));
}

TEST(PolicyTest, MakesEachPolicyByName) {
  for (const std::string_view name : Policy::names()) {
    const Policy policy = Policy::make(name, {}, filters());
    EXPECT_EQ(policy.name(), name);
    EXPECT_EQ(policy.bounded(), name != "full");
    if (!policy.bounded()) continue;
    EXPECT_EQ(policy.scorer()->name(), name);
  }
}

TEST(PolicyTest, HasTheDefaultsOfTheMethod) {
  const PolicyOptions defaults;
  EXPECT_EQ(defaults.budget, 512U);
  EXPECT_EQ(defaults.protection, (Protection{4, 0}));
  EXPECT_EQ(defaults.interval, 0U);
  EXPECT_EQ(defaults.sign, 1);
  EXPECT_EQ(defaults.seed, 0U);
}

TEST(PolicyTest, KeepsEveryRowWhenFull) {
  const Policy policy = Policy::full();
  EXPECT_EQ(policy.name(), "full");
  EXPECT_FALSE(policy.bounded());
  EXPECT_EQ(policy.scorer(), nullptr);
  for (const std::size_t rows : {0U, 512U, 1000000U}) {
    EXPECT_EQ(policy.rows_after_commit(rows), rows);
  }
}

TEST(PolicyTest, IgnoresTheBudgetWhenFull) {
  const Policy policy = Policy::make("full", options(1, 4, 4));
  EXPECT_EQ(policy.rows_after_commit(100), 100U);
}

TEST(PolicyTest, EvictsWhateverExceedsTheBudget) {
  const Policy policy = Policy::make("streaming", options(8, 1, 2));
  EXPECT_EQ(policy.rows_after_commit(0), 0U);
  EXPECT_EQ(policy.rows_after_commit(8), 8U);
  EXPECT_EQ(policy.rows_after_commit(9), 8U);
  EXPECT_EQ(policy.rows_after_commit(1000), 8U);
}

TEST(PolicyTest, WaitsForTheIntervalThenEvictsDownToTheBudget) {
  const Policy policy = Policy::make("knorm", options(8, 1, 2, 4));
  EXPECT_EQ(policy.rows_after_commit(8), 8U);
  EXPECT_EQ(policy.rows_after_commit(11), 11U);
  EXPECT_EQ(policy.rows_after_commit(12), 8U);
  EXPECT_EQ(policy.rows_after_commit(13), 8U);
}

TEST(PolicyTest, DoesNotWrapAroundHugeIntervals) {
  constexpr std::size_t kHuge = std::numeric_limits<std::size_t>::max();
  const Policy policy = Policy::make("knorm", options(8, 1, 2, kHuge));
  EXPECT_EQ(policy.rows_after_commit(1000), 1000U);
}

TEST(PolicyTest, RejectsUnknownNamesAndListsTheKnownOnes) {
  EXPECT_THAT(
      error_of([] { static_cast<void>(Policy::make("snapkv", {})); }),
      IsError(
          ErrorKind::kInvalidArgument,
          "'snapkv'; known: full, auto, qfilters, streaming, knorm, random"));
  EXPECT_THAT(
      error_of([] { static_cast<void>(Policy::make("Full", {})); }),
      IsError(ErrorKind::kInvalidArgument, "'Full'"));
}

TEST(PolicyTest, RejectsABudgetThatProtectionFills) {
  constexpr std::size_t kHuge = std::numeric_limits<std::size_t>::max();
  for (const PolicyOptions& bad :
       {options(8, 4, 4),
        options(8, 8, 0),
        options(0, 0, 0),
        options(8, kHuge, 9),
        options(8, 2, kHuge),
        options(kHuge, kHuge, kHuge)}) {
    EXPECT_THAT(
        error_of([&] { static_cast<void>(Policy::make("random", bad)); }),
        IsError(ErrorKind::kInvalidArgument, "must be below the budget"));
  }
  EXPECT_EQ(
      error_of(
          [] { static_cast<void>(Policy::make("random", options(8, 4, 3))); }),
      std::nullopt);
}

TEST(PolicyTest, RejectsQFiltersWithoutFiltersOrSign) {
  EXPECT_THAT(
      error_of([] { static_cast<void>(Policy::make("qfilters", {})); }),
      IsError(ErrorKind::kInvalidArgument, "qfilters calibrate"));
  PolicyOptions bad;
  bad.sign = 0;
  EXPECT_THAT(
      error_of(
          [&] { static_cast<void>(Policy::make("qfilters", bad, filters())); }),
      IsError(ErrorKind::kInvalidArgument, "sign must be +1 or -1, got 0"));
}

class ConstantScorer final : public Scorer {
 public:
  [[nodiscard]] std::string_view name() const noexcept override {
    return "constant";
  }

  void score(const ScoreInput& /*in*/, std::span<float> out) const override {
    std::fill(out.begin(), out.end(), 1.0F);
  }
};

TEST(PolicyTest, TakesAScorerOfOnesOwn) {
  const auto scorer = std::make_shared<const ConstantScorer>();
  const Policy policy = Policy::custom(scorer, options(8, 1, 2));
  EXPECT_EQ(policy.name(), "constant");
  EXPECT_EQ(policy.scorer(), scorer);
  EXPECT_EQ(policy.rows_after_commit(9), 8U);
  EXPECT_THAT(
      error_of([] { static_cast<void>(Policy::custom(nullptr, {})); }),
      IsError(ErrorKind::kInvalidArgument, "no scorer"));
  EXPECT_THAT(
      error_of(
          [&] { static_cast<void>(Policy::custom(scorer, options(2, 2, 0))); }),
      IsError(ErrorKind::kInvalidArgument, "must be below the budget"));
}

}  // namespace
}  // namespace qfilters
