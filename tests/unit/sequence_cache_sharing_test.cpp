// Budgets that heads share, blocks of rows, scores that depend on other rows.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "qfilters/error.h"
#include "qfilters/sequence_cache.h"

#include "unit/generators.h"
#include "unit/sequence_fixture.h"

namespace qfilters {
namespace {

using test::any_of;
using test::any_split;
using test::contents_of;
using test::Model;
using test::qfilters_policy;

constexpr std::size_t kTokens = test::kModelTokens;

// Three layers, one of them windowed.
const Model& model() {
  static const Model made({{2, 8, 8, 0}, {3, 8, 4, 90}, {3, 6, 8, 0}}, 2);
  return made;
}

PolicyOptions any_options() {
  PolicyOptions out;
  out.rule = *rc::gen::element(
      BudgetRule::kUniform, BudgetRule::kPerLayer, BudgetRule::kShared);
  out.floor = *rc::gen::element(0.0, 0.2, 0.5, 1.0);
  out.block = *rc::gen::element<std::size_t>(1, 2, 7, 16);
  out.protection = {any_of(0, 4), any_of(0, 20)};
  out.budget = out.protection.sinks + out.protection.recent + any_of(1, 60);
  out.interval = *rc::gen::element<std::size_t>(0, 0, 5, 40);
  return out;
}

SequenceOptions in_any_order() {
  SequenceOptions out = model().options();
  out.order = *rc::gen::element(RowOrder::kTemporal, RowOrder::kSlot);
  return out;
}

// Which heads share: groups of {layer, group}, windowed layers apart.
std::vector<std::vector<std::pair<std::size_t, std::size_t>>> sharing(
    BudgetRule rule) {
  std::vector<std::vector<std::pair<std::size_t, std::size_t>>> out;
  for (std::size_t b = 0; b < model().batch; ++b) {
    if (rule == BudgetRule::kShared) out.emplace_back();
    for (std::size_t l = 0; l < model().layers.size(); ++l) {
      if (model().layers[l].window != 0) continue;
      if (rule == BudgetRule::kPerLayer) out.emplace_back();
      for (std::size_t h = 0; h < model().layers[l].kv_heads; ++h) {
        if (rule == BudgetRule::kUniform) out.emplace_back();
        out.back().emplace_back(l, b * model().layers[l].kv_heads + h);
      }
    }
  }
  return out;
}

RC_GTEST_PROP(SequenceCacheSharingTest, KeepsWithinTheSharedBudget, ()) {
  const PolicyOptions options = any_options();
  const Policy policy = qfilters_policy(model(), options);
  SequenceCache cache(model().layers, policy, in_any_order());
  for (const std::size_t count : any_split(any_of(0, kTokens))) {
    const auto before = contents_of(cache);
    model().feed(cache, {count});
    for (const auto& heads : sharing(options.rule)) {
      std::size_t rows = 0;
      std::size_t had = 0;
      for (const auto& [l, g] : heads) {
        const std::size_t n = cache.store(l).rows(g);
        const std::size_t held = before.layers[l][g].positions.size() + count;
        rows += n;
        had += held;
        const std::size_t least = std::max(
            heads.size() == 1 ? 0 : policy.least_rows(),
            options.protection.sinks + options.protection.recent);
        RC_ASSERT(n >= std::min(held, least));
      }
      const std::size_t budget = options.budget * heads.size();
      const bool evicts =
          had > budget && had - budget >= options.interval * heads.size();
      RC_ASSERT(rows == (evicts ? budget : had));
    }
  }
  test::expect_true_rows(cache, model());
}

// One commit of everything: the choice of select_shared() over block means.
RC_GTEST_PROP(SequenceCacheSharingTest, ChoosesTheBestBlocksOfAllHeads, ()) {
  PolicyOptions options = any_options();
  options.interval = 0;
  const std::size_t tokens = any_of(1, kTokens);
  SequenceCache cache(
      model().layers, qfilters_policy(model(), options), in_any_order());
  model().feed(cache, {tokens});
  PolicyOptions all = options;
  all.budget = 2 * kTokens;
  SequenceCache everything(
      model().layers, qfilters_policy(model(), all), model().options());
  model().feed(everything, {tokens});
  for (const auto& heads : sharing(options.rule)) {
    if (tokens <= options.budget) continue;
    std::vector<std::vector<float>> scores;
    for (const auto& [l, g] : heads) {
      const auto own = everything.store(l).scores(g);
      scores.emplace_back(own.begin(), own.end());
      for (std::size_t i = 0; i < tokens; ++i) {
        const std::size_t begin = i / options.block * options.block;
        const std::size_t end = std::min(begin + options.block, tokens);
        float sum = 0;
        for (std::size_t j = begin; j < end; ++j)
          sum += own[j];
        scores.back()[i] = sum / static_cast<float>(end - begin);
      }
    }
    std::vector<std::vector<std::uint32_t>> kept(heads.size());
    std::vector<SharingHead> choice;
    for (std::size_t i = 0; i < heads.size(); ++i)
      choice.push_back({scores[i], &kept[i]});
    const auto least = static_cast<std::size_t>(
        options.floor * static_cast<double>(options.budget));
    select_shared(
        choice,
        options.budget * heads.size(),
        heads.size() == 1 ? 0 : least,
        options.protection);
    for (std::size_t i = 0; i < heads.size(); ++i) {
      const auto positions =
          cache.store(heads[i].first).positions(heads[i].second);
      RC_ASSERT(
          std::vector<std::uint32_t>(positions.begin(), positions.end()) ==
          kept[i]);
    }
  }
}

RC_GTEST_PROP(SequenceCacheSharingTest, GoesOnFromASnapshot, ()) {
  const Policy policy = qfilters_policy(model(), any_options());
  const SequenceOptions order = in_any_order();
  SequenceCache straight(model().layers, policy, order);
  SequenceCache resumed(model().layers, policy, order);
  model().feed(straight, any_split(any_of(0, kTokens / 2)));
  resumed.restore(straight.save());
  const auto rest = any_split(any_of(0, kTokens / 2));
  model().feed(straight, rest);
  model().feed(resumed, rest);
  RC_ASSERT(contents_of(straight) == contents_of(resumed));
}

TEST(SequenceCacheSharingTest, ASnapshotBelongsToItsRuleAndBlock) {
  PolicyOptions options = test::budget(40, 2, 8);
  const auto cache = [&] {
    return SequenceCache(
        model().layers, qfilters_policy(model(), options), model().options());
  };
  options.rule = BudgetRule::kShared;
  const Snapshot saved = cache().save();
  const auto refused = [&](const char* part) {
    SequenceCache other = cache();
    EXPECT_THAT(
        test::error_of([&] { other.restore(saved); }),
        test::IsError(ErrorKind::kMismatch, part));
  };
  options.rule = BudgetRule::kPerLayer;
  refused("has 'rule shared', this cache has 'rule per-layer'");
  options.rule = BudgetRule::kUniform;
  refused("has 'rule shared', this cache has no such thing");
  options.rule = BudgetRule::kShared;
  options.floor = 0.5;
  refused("has 'least 8', this cache has 'least 20'");
  options.floor = 0.2;
  options.block = 4;
  refused("has no such thing, this cache has 'block 4'");
}

// Threads and which rows are where never change what is chosen.
TEST(SequenceCacheSharingTest, GivesTheSameRowsOnAnyNumberOfThreads) {
  PolicyOptions options = test::budget(50, 2, 8);
  options.rule = BudgetRule::kShared;
  options.block = 4;
  const auto run = [&](int threads, RowOrder order) {
    SequenceOptions sequence = model().options();
    sequence.threads = threads;
    sequence.order = order;
    SequenceCache cache(
        model().layers, qfilters_policy(model(), options), sequence);
    model().feed(cache, {100, 1, 64, 1, 1, 70});
    return test::in_temporal_order(cache);
  };
  const auto one = run(1, RowOrder::kTemporal);
  EXPECT_EQ(run(2, RowOrder::kTemporal), one);
  EXPECT_EQ(run(7, RowOrder::kSlot), one);
}

// Prefers rows whose position is far from the middle of what the head holds:
// that depends on the other rows.
class FarFromTheMiddle final : public Scorer {
 public:
  [[nodiscard]] std::string_view name() const noexcept override {
    return "far";
  }

  void score(const ScoreInput& /*in*/, std::span<float> out) const override {
    std::fill(out.begin(), out.end(), -1.0F);
  }

  [[nodiscard]] bool frozen() const noexcept override { return false; }

  void rescore(const RescoreInput& in, std::span<float> scores) const override {
    const std::size_t group = in.batch * in.rows.shape().kv_heads + in.kv_head;
    ASSERT_EQ(scores.size(), in.rows.rows(group));
    float sum = 0;
    for (std::size_t r = 0; r < scores.size(); ++r) {
      EXPECT_EQ(scores[r], -1.0F) << "the score of the entry";
      sum += static_cast<float>(in.rows.position(group, r));
    }
    const float middle = sum / static_cast<float>(scores.size());
    for (std::size_t r = 0; r < scores.size(); ++r) {
      const float away =
          static_cast<float>(in.rows.position(group, r)) - middle;
      scores[r] = away * away;
    }
  }
};

TEST(SequenceCacheSharingTest, ScoresThatDependOnOtherRowsAreAskedForAgain) {
  for (const RowOrder order : {RowOrder::kTemporal, RowOrder::kSlot}) {
    SequenceOptions options = model().options();
    options.order = order;
    SequenceCache cache(
        model().layers,
        Policy::custom(
            std::make_shared<FarFromTheMiddle>(), test::budget(10, 0, 0)),
        options);
    // Of 0..19 the outer ten stay; then of these and 20 all but the one that
    // is nearest to their mean of (95 + 20) / 11.
    model().feed(cache, {20});
    const auto rows = [&] {
      return test::in_temporal_order(cache).layers[0][1].positions;
    };
    EXPECT_THAT(
        rows(), ::testing::ElementsAre(0, 1, 2, 3, 4, 15, 16, 17, 18, 19));
    model().feed(cache, {1});
    EXPECT_THAT(
        rows(), ::testing::ElementsAre(0, 1, 2, 3, 4, 16, 17, 18, 19, 20));
    EXPECT_THAT(cache.store(0).scores(1), ::testing::Each(-1.0F));
  }
}

}  // namespace
}  // namespace qfilters
