// Who computes which part of attention.
#include "core/attention_plan.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

#include <gtest/gtest.h>

#include "unit/attention_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using Case = test::AttentionCase;

// The plan of one call; its data, whose values do not matter, go with it.
struct Planned {
  explicit Planned(const Case& c, int threads)
      : data(c),
        rows(data.rows()),
        options(c.options),
        call{data.queries().view(), rows, options, out, 1.0F, c.share} {
    options.threads = threads;
    plan.prepare(call, false);
  }

  test::AttentionCall data;
  RowsView rows;
  AttentionOptions options;
  OutputView out;
  AttentionCall call;
  AttentionPlan plan;
};

// Every block of every job belongs to one item.
void expect_partition(const AttentionPlan& plan) {
  for (std::size_t i = 0; i < plan.jobs().size(); ++i) {
    const AttentionJob& job = plan.jobs()[i];
    std::vector<int> seen(job.end_block);
    for (const AttentionItem& item : plan.items()) {
      if (item.job != i) continue;
      for (std::size_t b = item.first_block; b < item.end_block; ++b)
        ++seen.at(b);
    }
    for (std::size_t b = 0; b < job.end_block; ++b) {
      EXPECT_EQ(seen[b], b < job.first_block ? 0 : 1) << "job " << i;
    }
  }
}

bool is_longest_first(const AttentionPlan& plan) {
  return std::ranges::is_sorted(
      plan.items(), std::greater(), &AttentionItem::cost);
}

TEST(AttentionPlanTest, OneThreadTakesWholeJobs) {
  const Planned p({.stored = 3000, .tokens = 70, .share = 3}, 1);
  EXPECT_FALSE(p.plan.split());
  EXPECT_EQ(p.plan.jobs().size(), 8U);  // 21 tokens of 3 queries, 2 heads
  EXPECT_EQ(p.plan.items().size(), 8U);
  EXPECT_EQ(p.plan.blocks(), 3U);
  expect_partition(p.plan);
}

TEST(AttentionPlanTest, ThreadsShareTheRowsOfOneHead) {
  const Planned p({.stored = 4095, .kv_heads = 1, .share = 4}, 2);
  EXPECT_TRUE(p.plan.split());
  EXPECT_EQ(p.plan.jobs().size(), 1U);
  EXPECT_EQ(p.plan.items().size(), 4U);
  expect_partition(p.plan);
}

TEST(AttentionPlanTest, HeadsOfOneBlockAreNotSplit) {
  EXPECT_FALSE(Planned({.stored = 1023, .kv_heads = 1}, 4).plan.split());
}

TEST(AttentionPlanTest, TheLongestItemsComeFirst) {
  for (const int threads : {1, 3}) {
    const Planned p(
        {.stored = 5000, .tokens = 40, .kv_heads = 4, .ragged = true}, threads);
    EXPECT_EQ(p.plan.split(), threads > 1);
    EXPECT_TRUE(is_longest_first(p.plan));
    EXPECT_GT(p.plan.items().front().cost, p.plan.items().back().cost);
    expect_partition(p.plan);
  }
}

TEST(AttentionPlanTest, AWindowLeavesOutTheBlocksThatNobodySees) {
  const Planned p({.stored = 4500, .options = {.window = 600}}, 2);
  for (const AttentionJob& job : p.plan.jobs()) {
    EXPECT_EQ(job.first_block, 3U);
    EXPECT_EQ(job.end_block, 5U);
  }
  expect_partition(p.plan);
}

TEST(AttentionPlanTest, ManyPartialSumsAreNotKept) {
  const Case c{.stored = 2000, .tokens = 2100, .key_dim = 1, .value_dim = 400};
  EXPECT_FALSE(Planned(c, 2).plan.split());
  EXPECT_TRUE(Planned(c, 16).plan.split());
}

}  // namespace
}  // namespace qfilters
