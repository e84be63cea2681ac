// Policies that look at second readings: rows come in unseen, are seen in
// micro-batches that leave nothing else behind, and go when they are told to.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/sequence_cache.h"

#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

using test::budget;
using test::contents_of;
using test::error_of;
using test::IsError;
using test::Model;

using Kind = AttentionStatistics::Kind;

class LargestScorer final : public Scorer {
 public:
  [[nodiscard]] std::string_view name() const noexcept override {
    return "largest";
  }

  [[nodiscard]] std::optional<AttentionNeeds> attention()
      const noexcept override {
    return AttentionNeeds{Kind::kMax, 0};
  }

  [[nodiscard]] bool rehearses() const noexcept override { return true; }

  void score(const ScoreInput& /*in*/, std::span<float> out) const override {
    std::fill(out.begin(), out.end(), 0.0F);
  }

  void observe(const ObserveInput& in, std::span<float> scores) const override {
    const auto& attention = in.attention[in.group()];
    for (std::size_t r = 0; r < scores.size(); ++r)
      scores[r] = std::max(scores[r], attention[r]);
  }
};

Policy largest(const PolicyOptions& options) {
  return Policy::custom(std::make_shared<const LargestScorer>(), options);
}

// A global layer of two heads and a windowed one.
const Model& model() {
  static const Model model({{2, 16, 8, 0}, {1, 8, 8, 70}});
  return model;
}

SequenceCache cache_of(std::size_t rows, std::size_t interval = 0) {
  return {
      model().layers, largest(budget(rows, 1, 1, interval)), model().options()};
}

// Opens a second reading of `count` tokens and shows both heads attention(row)
// of their stored and new rows.
template <typename Attention>
void open_rehearsal(
    SequenceCache& cache, std::size_t count, const Attention& attention) {
  cache.begin(count, Pass::kRehearse);
  for (std::size_t l = 0; l < 2; ++l) {
    cache.append(
        l, model().keys[l].slice(0, count), model().values[l].slice(0, count));
  }
  AttentionStatistics seen;
  seen.kind = Kind::kMax;
  for (std::size_t g = 0; g < 2; ++g) {
    auto& rows = seen.rows.emplace_back(cache.rows(0).rows(g));
    for (std::size_t r = 0; r < rows.size(); ++r)
      rows[r] = attention(r);
  }
  cache.observe(0, seen);
}

std::vector<std::int32_t> positions_of(
    const SequenceCache& cache, std::size_t group) {
  const auto positions = cache.store(0).positions(group);
  return {positions.begin(), positions.end()};
}

TEST(SequenceRehearsalTest, ACommitStoresRowsUnseenAndEvictsNone) {
  SequenceCache cache = cache_of(4);
  model().append(cache, 9);
  EXPECT_FALSE(cache.attention_needs(0).has_value());
  cache.commit();
  EXPECT_EQ(cache.store(0).rows(0), 9U);
  EXPECT_THAT(cache.store(0).scores(0), Each(0.0F));
  EXPECT_EQ(cache.unrehearsed(), 9U);
  EXPECT_TRUE(cache.eviction_due());
}

TEST(SequenceRehearsalTest, KeepsTheLargestAttentionOfAllSecondReadings) {
  SequenceCache cache = cache_of(4);
  model().feed(cache, {6});
  open_rehearsal(cache, 3, [](std::size_t r) { return r == 2 ? 0.5F : 0.1F; });
  EXPECT_TRUE(cache.attention_needs(0).has_value());
  cache.commit();
  open_rehearsal(cache, 2, [](std::size_t r) { return r == 3 ? 0.4F : 0.2F; });
  cache.commit();
  for (const std::size_t g : {0U, 1U}) {
    EXPECT_THAT(
        cache.store(0).scores(g),
        ElementsAre(0.2F, 0.2F, 0.5F, 0.4F, 0.2F, 0.2F));
  }
  cache.evict();
  EXPECT_THAT(positions_of(cache, 0), ElementsAre(0, 2, 3, 5));
  EXPECT_EQ(cache.unrehearsed(), 0U);
  EXPECT_FALSE(cache.eviction_due());
  EXPECT_EQ(cache.stats().evictions, 1U);
  EXPECT_EQ(cache.stats().rows_evicted, 4U);
}

TEST(SequenceRehearsalTest, ASecondReadingLeavesNothingButScores) {
  SequenceCache cache = cache_of(4);
  model().feed(cache, {100});
  auto before = contents_of(cache);
  open_rehearsal(cache, 40, [](std::size_t) { return 0.25F; });
  EXPECT_EQ(contents_of(cache), before);
  cache.rollback();
  EXPECT_EQ(contents_of(cache), before);
  open_rehearsal(cache, 40, [](std::size_t) { return 0.25F; });
  cache.commit();
  for (auto& group : before.layers[0]) {
    const std::vector<float> seen(100, 0.25F);
    group.scores = test::bits_of(std::span(seen));
  }
  EXPECT_EQ(contents_of(cache), before);
  EXPECT_EQ(cache.offset(), 100U);
}

TEST(SequenceRehearsalTest, RowsThatWereNotReadAgainNeverGo) {
  SequenceCache cache = cache_of(4);
  model().feed(cache, {9});
  const auto refused = IsError(
      ErrorKind::kInvalidArgument,
      "evict: policy largest has not seen the last 9 tokens");
  EXPECT_THAT(error_of([&] { cache.evict(); }), refused);
  open_rehearsal(cache, 2, [](std::size_t) { return 0.5F; });
  EXPECT_THAT(
      error_of([&] { cache.evict(); }),
      IsError(ErrorKind::kInvalidArgument, "evict: a micro-batch is open"));
  cache.commit();
  model().feed(cache, {1});  // newer than the second reading
  EXPECT_THAT(
      error_of([&] { cache.evict(); }),
      IsError(ErrorKind::kInvalidArgument, "the last 10 tokens"));
  EXPECT_EQ(cache.store(0).rows(0), 10U);
}

TEST(SequenceRehearsalTest, EvictionIsDueOnceTheIntervalIsFull) {
  SequenceCache cache = cache_of(10, 5);
  model().feed(cache, {14});
  EXPECT_FALSE(cache.eviction_due());
  model().feed(cache, {1});
  EXPECT_TRUE(cache.eviction_due());
}

TEST(SequenceRehearsalTest, OnlySuchAPolicyMayRehearse) {
  SequenceCache cache(
      model().layers,
      Policy::make("streaming", budget(4, 1, 1, 8)),
      model().options());
  EXPECT_THAT(
      error_of([&] { cache.begin(1, Pass::kRehearse); }),
      IsError(ErrorKind::kInvalidArgument, "policy streaming does not"));
  EXPECT_FALSE(cache.open());
}

TEST(SequenceRehearsalTest, OtherPoliciesEvictWhenToldWhateverTheInterval) {
  SequenceCache cache(
      model().layers,
      Policy::make("streaming", budget(4, 1, 1, 8)),
      model().options());
  model().feed(cache, {9});
  EXPECT_FALSE(cache.eviction_due());
  cache.evict();
  EXPECT_THAT(positions_of(cache, 0), ElementsAre(0, 6, 7, 8));
  const auto once = contents_of(cache);
  cache.evict();
  EXPECT_EQ(contents_of(cache), once);
}

TEST(SequenceRehearsalTest, AChangedPolicyMustSeeAllTokensAgain) {
  SequenceCache cache(model().layers, Policy::full(), model().options());
  model().feed(cache, {9});
  cache.evict();
  EXPECT_EQ(cache.store(0).rows(0), 9U);
  EXPECT_EQ(cache.unrehearsed(), 0U);
  cache.set_policy(largest(budget(4, 1, 1)));
  EXPECT_EQ(cache.unrehearsed(), 9U);
  EXPECT_TRUE(cache.eviction_due());
  open_rehearsal(cache, 9, [](std::size_t r) { return r == 4 ? 0.9F : 0.1F; });
  cache.commit();
  cache.evict();
  EXPECT_THAT(positions_of(cache, 1), ElementsAre(0, 4, 7, 8));
}

TEST(SequenceRehearsalTest, ASavedSequenceContinuesBitForBitAtAnyPoint) {
  const auto attention = [](std::size_t r) {
    return static_cast<float>(r * 7 % 11) / 16;
  };
  const auto rehearse = [&](SequenceCache& cache) {
    open_rehearsal(cache, 5, attention);
    cache.commit();
  };
  for (const int point : {0, 1, 2}) {
    SCOPED_TRACE(point);
    SequenceCache straight = cache_of(8);
    SequenceCache resumed = cache_of(8);
    const auto between = [&](int at) {
      if (at == point) resumed.restore(straight.save());
    };
    model().feed(straight, {20});
    between(0);
    rehearse(straight);
    if (point < 1) rehearse(resumed);
    between(1);
    straight.evict();
    if (point < 2) resumed.evict();
    between(2);
    for (SequenceCache* cache : {&straight, &resumed}) {
      EXPECT_EQ(cache->unrehearsed(), 0U);
      model().feed(*cache, {7});
      rehearse(*cache);
      cache->evict();
    }
    EXPECT_EQ(contents_of(resumed), contents_of(straight));
  }
}

}  // namespace
}  // namespace qfilters
