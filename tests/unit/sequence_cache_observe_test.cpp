// What a sequence makes of attention: scores that change with every micro-batch
// and only with those that are committed.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/sequence_cache.h"

#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using ::testing::ElementsAre;

using test::budget;
using test::contents_of;
using test::error_of;
using test::IsError;
using test::Model;

using Kind = AttentionStatistics::Kind;

// Rows enter with 1; each micro-batch adds what it attends.
class AddingScorer final : public Scorer {
 public:
  [[nodiscard]] std::string_view name() const noexcept override {
    return "adding";
  }

  [[nodiscard]] std::optional<AttentionNeeds> attention()
      const noexcept override {
    return AttentionNeeds{Kind::kMax, 3};
  }

  void score(const ScoreInput& /*in*/, std::span<float> out) const override {
    std::fill(out.begin(), out.end(), 1.0F);
  }

  void observe(const ObserveInput& in, std::span<float> scores) const override {
    const auto& attention = in.attention[in.group()];
    for (std::size_t r = 0; r < scores.size(); ++r) {
      if (attention[r] < 0) throw std::runtime_error("negative attention");
      scores[r] += attention[r];
    }
  }
};

Policy adding(const PolicyOptions& options) {
  return Policy::custom(std::make_shared<const AddingScorer>(), options);
}

// A global layer of two heads and a windowed one.
const Model& model() {
  static const Model model({{2, 16, 8, 0}, {1, 8, 8, 70}});
  return model;
}

SequenceCache cache_of(std::size_t rows) {
  return {model().layers, adding(budget(rows, 1, 1)), model().options()};
}

// Attention [group][row] for the global layer: 10 * group + row + `more`.
AttentionStatistics statistics_for(const SequenceCache& cache, float more = 0) {
  AttentionStatistics out;
  out.kind = Kind::kMax;
  out.last_queries = 3;
  for (std::size_t g = 0; g < 2; ++g) {
    auto& rows = out.rows.emplace_back(cache.rows(0).rows(g));
    for (std::size_t r = 0; r < rows.size(); ++r)
      rows[r] = static_cast<float>(10 * g + r) + more;
  }
  return out;
}

void feed(SequenceCache& cache, std::size_t count) {
  model().append(cache, count);
  cache.observe(0, statistics_for(cache));
  cache.commit();
}

TEST(SequenceObserveTest, AsksForWhatTheScorerNeedsInGlobalLayers) {
  const SequenceCache cache = cache_of(9);
  EXPECT_EQ(cache.attention_needs(0), (AttentionNeeds{Kind::kMax, 3}));
  EXPECT_EQ(cache.attention_needs(1), std::nullopt);
  EXPECT_THAT(
      error_of([&] { (void)cache.attention_needs(2); }),
      IsError(ErrorKind::kInvalidArgument, "layer 2 of 2"));
  for (const Policy& policy :
       {Policy::full(), Policy::make("knorm", budget(9, 1, 1))}) {
    const SequenceCache other(model().layers, policy, model().options());
    EXPECT_EQ(other.attention_needs(0), std::nullopt);
  }
}

TEST(SequenceObserveTest, ScoresOfStoredAndNewRowsTravelWithTheRows) {
  SequenceCache cache = cache_of(5);
  feed(cache, 4);
  EXPECT_THAT(cache.store(0).scores(0), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(cache.store(0).scores(1), ElementsAre(11, 12, 13, 14));
  feed(cache, 3);
  // Of seven rows the first, the last and the three best others stay.
  EXPECT_THAT(cache.store(0).positions(0), ElementsAre(0, 3, 4, 5, 6));
  EXPECT_THAT(cache.store(0).scores(0), ElementsAre(1, 7, 5, 6, 7));
  EXPECT_THAT(cache.store(0).positions(1), ElementsAre(0, 1, 2, 3, 6));
  EXPECT_THAT(cache.store(0).scores(1), ElementsAre(21, 23, 25, 27, 17));
  feed(cache, 1);
  EXPECT_THAT(cache.store(0).positions(0), ElementsAre(0, 3, 5, 6, 7));
  EXPECT_THAT(cache.store(0).scores(0), ElementsAre(1, 8, 9, 11, 6));
}

TEST(SequenceObserveTest, RollbackLeavesStoredScoresAsTheyWere) {
  SequenceCache cache = cache_of(5);
  feed(cache, 7);
  const auto before = contents_of(cache);
  model().append(cache, 3);
  cache.observe(0, statistics_for(cache, 100));
  EXPECT_EQ(contents_of(cache), before);
  cache.rollback();
  EXPECT_EQ(contents_of(cache), before);
  feed(cache, 3);
  SequenceCache untroubled = cache_of(5);
  feed(untroubled, 7);
  feed(untroubled, 3);
  EXPECT_EQ(contents_of(cache), contents_of(untroubled));
}

TEST(SequenceObserveTest, AScorerThatFailsChangesNothing) {
  SequenceCache cache = cache_of(5);
  feed(cache, 7);
  const auto before = contents_of(cache);
  model().append(cache, 3);
  auto bad = statistics_for(cache);
  bad.rows[1][6] = -1;  // in the second head
  EXPECT_THROW(cache.observe(0, bad), std::runtime_error);
  EXPECT_EQ(contents_of(cache), before);
  EXPECT_THAT(
      error_of([&] { cache.commit(); }),
      IsError(
          ErrorKind::kInvalidArgument,
          "layer 0 was not observed, which policy adding needs"));
  EXPECT_EQ(contents_of(cache), before);
  cache.observe(0, statistics_for(cache));
  cache.commit();
  SequenceCache untroubled = cache_of(5);
  feed(untroubled, 7);
  feed(untroubled, 3);
  EXPECT_EQ(contents_of(cache), contents_of(untroubled));
}

TEST(SequenceObserveTest, ACommitWithoutMemoryKeepsScoresAndObservation) {
  SequenceOptions options = model().options();
  // Two heads of 64 rows of 24 values, one of 64 rows of 16, and a little.
  options.byte_limit = 2 * (2 * 64 * 24 + 64 * 16) + 100;
  SequenceCache cache(model().layers, adding(budget(80, 1, 1)), options);
  feed(cache, 60);
  const auto before = contents_of(cache);
  model().append(cache, 10);
  cache.observe(0, statistics_for(cache, 7));
  for (int again = 0; again < 2; ++again) {
    EXPECT_THAT(
        error_of([&] { cache.commit(); }),
        IsError(ErrorKind::kMemoryLimit, ""));
    EXPECT_EQ(contents_of(cache), before);
  }
}

TEST(SequenceObserveTest, RefusesWhatDoesNotFit) {
  SequenceCache cache = cache_of(5);
  feed(cache, 7);
  const auto refused = [&](std::size_t layer, const AttentionStatistics& s) {
    return error_of([&] { cache.observe(layer, s); });
  };
  const auto early = statistics_for(cache);
  EXPECT_THAT(
      refused(0, early),
      IsError(ErrorKind::kInvalidArgument, "layer 0 has no new rows"));
  model().append(cache, 2);
  EXPECT_THAT(
      refused(0, early), IsError(ErrorKind::kShape, "layer 0 has other rows"));
  EXPECT_THAT(
      refused(1, early),
      IsError(ErrorKind::kInvalidArgument, "layer 1 needs no attention"));
  EXPECT_THAT(
      refused(2, early), IsError(ErrorKind::kInvalidArgument, "layer 2 of 2"));
  auto bad = statistics_for(cache);
  bad.kind = Kind::kSum;
  EXPECT_THAT(
      refused(0, bad), IsError(ErrorKind::kInvalidArgument, "another kind"));
  bad = statistics_for(cache);
  bad.last_queries = 2;
  EXPECT_THAT(
      refused(0, bad),
      IsError(ErrorKind::kInvalidArgument, "last 3 queries, not of 2"));
  bad = statistics_for(cache);
  bad.rows.pop_back();
  EXPECT_THAT(refused(0, bad), IsError(ErrorKind::kShape, "the 1 heads"));
  cache.observe(0, statistics_for(cache));
  EXPECT_THAT(
      refused(0, statistics_for(cache)),
      IsError(ErrorKind::kInvalidArgument, "was observed already"));
}

TEST(SequenceObserveTest, ANewPolicyStartsFromTheScoresOfEntry) {
  SequenceCache cache = cache_of(5);
  feed(cache, 7);
  cache.set_policy(adding(budget(5, 1, 1)));
  EXPECT_THAT(cache.store(0).scores(0), ::testing::Each(1.0F));
}

TEST(SequenceObserveTest, ASavedSequenceGoesOnWithItsScores) {
  SequenceCache cache = cache_of(5);
  feed(cache, 7);
  SequenceCache restored = cache_of(5);
  restored.restore(cache.save());
  EXPECT_EQ(contents_of(restored), contents_of(cache));
  feed(cache, 3);
  feed(restored, 3);
  EXPECT_EQ(contents_of(restored), contents_of(cache));
}

TEST(SequenceObserveTest, CountsNonFiniteScoresOfNewRowsOnce) {
  SequenceCache cache = cache_of(50);
  feed(cache, 3);
  model().append(cache, 2);
  auto statistics = statistics_for(cache);
  statistics.rows[0][0] = test::kNaN;  // a stored row
  statistics.rows[1][4] = test::kNaN;
  cache.observe(0, statistics);
  cache.commit();
  EXPECT_EQ(cache.stats().non_finite_scores, 1U);
  feed(cache, 2);
  EXPECT_EQ(cache.stats().non_finite_scores, 1U);
}

TEST(SequenceObserveTest, ThreadsAndRowOrderDoNotChangeWhatStays) {
  const Policy knorm = Policy::make("knorm", budget(40, 1, 1));
  SequenceCache want(model().layers, knorm, model().options());
  SequenceOptions options = model().options();
  options.threads = 2;
  options.order = RowOrder::kSlot;
  SequenceCache cache(model().layers, knorm, options);
  // Decoding under knorm leaves slots in no order.
  for (SequenceCache* each : {&want, &cache})
    model().feed(*each, std::vector<std::size_t>(90, 1));
  ASSERT_FALSE(std::ranges::is_sorted(cache.store(0).positions(0)));
  for (SequenceCache* each : {&want, &cache}) {
    each->set_policy(adding(budget(40, 1, 1)));
    for (const std::size_t count : {1U, 20U, 1U, 1U, 64U, 1U}) {
      model().append(*each, count);
      AttentionStatistics statistics = statistics_for(*each);
      for (std::size_t g = 0; g < 2; ++g) {
        for (std::size_t r = 0; r < statistics.rows[g].size(); ++r) {
          const auto position = each->rows(0).position(g, r);
          statistics.rows[g][r] = static_cast<float>(position * 37 % 101);
        }
      }
      each->observe(0, statistics);
      each->commit();
    }
  }
  EXPECT_EQ(test::in_temporal_order(cache), contents_of(want));
}

// Budgets of layers.

TEST(LayerBudgetTest, EachLayerKeepsItsOwn) {
  const Model two({{2, 16, 8, 0}, {1, 8, 8, 0}});
  for (const BudgetRule rule : {BudgetRule::kUniform, BudgetRule::kPerLayer}) {
    for (const RowOrder order : {RowOrder::kTemporal, RowOrder::kSlot}) {
      PolicyOptions options = budget(20, 2, 3);
      options.rule = rule;
      options.layer_budgets = {30, 10};
      SequenceOptions sequence = two.options();
      sequence.order = order;
      SequenceCache cache(two.layers, Policy::make("knorm", options), sequence);
      for (const std::size_t count : {25U, 1U, 60U, 1U, 1U, 1U}) {
        two.feed(cache, {count});
        const std::size_t seen = cache.offset();
        EXPECT_EQ(
            cache.store(0).rows(0) + cache.store(0).rows(1),
            2 * std::min<std::size_t>(seen, 30));
        EXPECT_EQ(cache.store(1).rows(0), std::min<std::size_t>(seen, 10));
      }
    }
  }
}

TEST(LayerBudgetTest, EqualOnesChangeNothingButTheName) {
  PolicyOptions options = budget(20, 2, 3, 5);
  SequenceCache want(
      model().layers, Policy::make("knorm", options), model().options());
  options.layer_budgets = {20, 20};
  SequenceCache cache(
      model().layers, Policy::make("knorm", options), model().options());
  model().feed(want, {40, 7, 1, 1});
  model().feed(cache, {40, 7, 1, 1});
  EXPECT_EQ(contents_of(cache), contents_of(want));
  EXPECT_THAT(
      error_of([&] { cache.restore(want.save()); }),
      IsError(ErrorKind::kMismatch, ""));
}

TEST(LayerBudgetTest, RefusesBudgetsThatDoNotFit) {
  PolicyOptions options = budget(20, 2, 3);
  options.layer_budgets = {20};
  EXPECT_THAT(
      error_of([&] {
        SequenceCache(model().layers, Policy::make("knorm", options));
      }),
      IsError(ErrorKind::kMismatch, "2 layers, but budgets for 1"));
  options.layer_budgets = {20, 5};
  EXPECT_THAT(
      error_of([&] { (void)Policy::make("knorm", options); }),
      IsError(ErrorKind::kInvalidArgument, "must be below the budget (5)"));
  options.layer_budgets = {20, 20};
  options.rule = BudgetRule::kShared;
  EXPECT_THAT(
      error_of([&] { (void)Policy::make("knorm", options); }),
      IsError(ErrorKind::kInvalidArgument, "have none of their own"));
}

}  // namespace
}  // namespace qfilters
