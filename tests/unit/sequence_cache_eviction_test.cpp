// What a sequence keeps: the eviction rule, head by head.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/sequence_cache.h"

#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using test::budget;
using test::chunks;
using test::contents_of;
using test::expect_recounted_stats;
using test::expect_true_rows;
using test::kModelTokens;
using test::Model;
using test::qfilters_policy;
using test::ReferenceHead;
using test::two_layers;

// What one eviction run should leave behind, head by head.
struct EvictionRun {
  std::string_view policy;
  std::size_t rows;
  Protection protection;
  std::size_t interval;
  std::size_t chunk;
};

void PrintTo(const EvictionRun& run, std::ostream* os) {
  *os << run.policy << " budget " << run.rows << " sinks "
      << run.protection.sinks << " recent " << run.protection.recent
      << " interval " << run.interval << " chunk " << run.chunk;
}

std::vector<EvictionRun> runs() {
  std::vector<EvictionRun> out;
  for (const std::string_view policy :
       {"qfilters", "streaming", "knorm", "random"}) {
    for (const std::size_t chunk : {1U, 7U, 64U, 300U}) {
      out.push_back({policy, 40, {4, 0}, 0, chunk});
      out.push_back({policy, 65, {4, 8}, 0, chunk});
      out.push_back({policy, 70, {0, 32}, 16, chunk});
      out.push_back({policy, 60, {4, 8}, 16, chunk});
      out.push_back({policy, 1, {0, 0}, 0, chunk});
    }
  }
  return out;
}

class EvictionRunTest : public ::testing::TestWithParam<EvictionRun> {};

TEST_P(EvictionRunTest, KeepsTheRowsOfANaivePerHeadReference) {
  const EvictionRun& run = GetParam();
  const Model& model = two_layers();
  PolicyOptions options = budget(
      run.rows, run.protection.sinks, run.protection.recent, run.interval);
  options.seed = 5;
  const Policy policy = Policy::make(run.policy, options, model.filters);
  SequenceCache cache(model.layers, policy, model.options());
  std::vector<std::vector<ReferenceHead>> want;
  std::uint64_t evicted = 0;
  std::uint64_t evictions = 0;
  for (const LayerShape& l : model.layers) {
    want.emplace_back(model.batch * l.kv_heads);
  }
  for (const std::size_t count : chunks(kModelTokens, run.chunk)) {
    std::size_t gone = 0;
    for (std::size_t l = 0; l < want.size(); ++l) {
      for (std::size_t g = 0; g < want[l].size(); ++g) {
        const std::size_t heads = model.layers[l].kv_heads;
        std::vector<float> scores(count);
        policy.scorer()->score(
            {l,
             g / heads,
             g % heads,
             model.keys[l].slice(cache.offset(), count),
             static_cast<std::int32_t>(cache.offset())},
            scores);
        for (std::size_t t = 0; t < count; ++t) {
          want[l][g].add(
              static_cast<std::int32_t>(cache.offset() + t), scores[t]);
        }
        gone += want[l][g].evict(run.rows, run.protection, run.interval);
      }
    }
    evicted += gone;
    evictions += gone > 0 ? 1 : 0;
    model.feed(cache, {count});
    expect_recounted_stats(cache, evictions, evicted);
  }
  for (std::size_t l = 0; l < want.size(); ++l) {
    for (std::size_t g = 0; g < want[l].size(); ++g) {
      EXPECT_TRUE(std::ranges::equal(
          cache.store(l).positions(g), want[l][g].positions));
      EXPECT_EQ(
          test::bits_of(cache.store(l).scores(g)),
          test::bits_of(want[l][g].scores));
    }
  }
  expect_true_rows(cache, model);
}

INSTANTIATE_TEST_SUITE_P(
    EachPolicy,
    EvictionRunTest,
    ::testing::ValuesIn(runs()),
    [](const auto& run) {
      return std::string(run.param.policy) + "_budget" +
             std::to_string(run.param.rows) + "_chunk" +
             std::to_string(run.param.chunk);
    });

TEST(EvictionTest, KeepsTheSameRowsHoweverTheTokensAreSplit) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const Model model({{2, 80, 16, 0}}, 1, dtype);
    for (const std::size_t recent : {0U, 8U, 32U}) {
      const Policy policy = qfilters_policy(model, budget(48, 4, recent));
      SequenceCache whole(model.layers, policy, model.options());
      model.feed(whole, {kModelTokens});
      const auto want = contents_of(whole);
      for (const std::size_t size : {1U, 2U, 7U, 50U, 64U, 150U}) {
        SequenceCache cache(model.layers, policy, model.options());
        model.feed(cache, chunks(kModelTokens, size));
        EXPECT_EQ(contents_of(cache), want)
            << "recent " << recent << ", micro-batches of " << size;
      }
    }
  }
}

TEST(EvictionTest, EvictsOnlyOnceBudgetPlusIntervalRowsAreHeld) {
  const Model& model = two_layers();
  SequenceCache cache(
      model.layers,
      qfilters_policy(model, budget(16, 2, 4, 8)),
      model.options());
  std::size_t rows = 0;
  for (std::size_t t = 0; t < 100; ++t) {
    model.feed(cache, {1});
    rows = rows + 1 == 24 ? 16 : rows + 1;
    ASSERT_EQ(cache.stats().rows_min, rows);
    ASSERT_EQ(cache.stats().rows_max, rows);
  }
  model.feed(cache, {200});
  EXPECT_EQ(cache.stats().rows_max, 16U);
}

TEST(EvictionTest, GivesTheSameResultForEveryThreadCount) {
  const Model& model = two_layers();
  const Policy policy = qfilters_policy(model, budget(33, 4, 8, 3));
  std::optional<test::Contents> want;
  for (const int threads : {1, 2, 7}) {
    SequenceOptions options = model.options();
    options.threads = threads;
    SequenceCache cache(model.layers, policy, options);
    model.feed(cache, {90, 1, 1, 70, 5, 133});
    if (!want) want = contents_of(cache);
    EXPECT_EQ(contents_of(cache), *want) << threads << " threads";
    expect_recounted_stats(
        cache, cache.stats().evictions, cache.stats().rows_evicted);
  }
}

TEST(EvictionTest, EvictsNonFiniteScoresFirstAndCountsThem) {
  Model model({{1, 16, 4, 0}});
  model.keys[0].row(0, 0, 5)[3] = 0x7E00;  // NaN
  model.keys[0].row(0, 0, 6)[3] = 0x7C00;  // infinity
  SequenceCache cache(
      model.layers, qfilters_policy(model, budget(9, 1, 1)), model.options());
  model.append(cache, 10);
  EXPECT_EQ(cache.stats().non_finite_scores, 2U);  // the open batch counts
  cache.rollback();
  EXPECT_EQ(cache.stats().non_finite_scores, 0U);
  model.feed(cache, {10});
  EXPECT_EQ(cache.stats().non_finite_scores, 2U);
  const auto positions = cache.store(0).positions(0);
  EXPECT_EQ(std::count(positions.begin(), positions.end(), 5), 0);
  model.feed(cache, {10});
  EXPECT_EQ(cache.stats().non_finite_scores, 2U);
}

}  // namespace
}  // namespace qfilters
