// Layers with a sliding window: their rows live outside the budget.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/attention.h"
#include "qfilters/error.h"
#include "qfilters/sequence_cache.h"

#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using test::bits_of;
using test::budget;
using test::chunks;
using test::contents_of;
using test::error_of;
using test::expect_recounted_stats;
using test::expect_true_rows;
using test::FloatTensor;
using test::IsError;
using test::kModelTokens;
using test::Model;
using test::qfilters_policy;

constexpr std::size_t kChunks[] = {1, 2, 7, 63, 64, 65, 100, 129, 300};

class WindowLayerTest : public ::testing::TestWithParam<std::size_t> {
 protected:
  Model model_{{{2, 16, 24, 0}, {2, 16, 24, GetParam()}}};
};

INSTANTIATE_TEST_SUITE_P(
    EachWindow,
    WindowLayerTest,
    ::testing::Values(1, 2, 17, 63, 64, 65, 66, 128, 200, 1000),
    ::testing::PrintToStringParamName());

TEST_P(WindowLayerTest, KeepsTheBlocksThatTheNextQuerySees) {
  for (const std::size_t chunk : kChunks) {
    SequenceCache cache(
        model_.layers,
        qfilters_policy(model_, budget(32, 4, 8)),
        model_.options());
    for (const std::size_t count : chunks(kModelTokens, chunk)) {
      model_.feed(cache, {count});
      const std::size_t seen = cache.offset();
      // The next query sees window - 1 rows behind it; a block goes whole.
      const std::size_t oldest = seen - std::min(seen, GetParam() - 1);
      const std::size_t first = oldest / kBlockRows * kBlockRows;
      for (std::size_t g = 0; g < 2; ++g) {
        const auto positions = cache.store(1).positions(g);
        ASSERT_EQ(positions.size(), seen - first) << "after " << seen;
        for (std::size_t r = 0; r < positions.size(); ++r) {
          ASSERT_EQ(positions[r], static_cast<std::int32_t>(first + r));
        }
      }
    }
    expect_true_rows(cache, model_);
    const SequenceStats stats = cache.stats();
    EXPECT_EQ(stats.rows_max, 32U);  // of the global layer
    expect_recounted_stats(cache, stats.evictions, stats.rows_evicted);
  }
}

// Attention of the windowed layer over the whole sequence.
std::vector<float> attend_in(
    const Model& model, SequenceCache& cache, std::size_t chunk) {
  const std::size_t window = model.layers[1].window;
  const FloatTensor queries = test::random_floats(3, 1, 6, kModelTokens, 16);
  FloatTensor out(DType::kFloat32, 1, 6, kModelTokens, 24);
  AttentionOptions options;
  options.window = window;
  for (const std::size_t count : chunks(kModelTokens, chunk)) {
    const std::size_t first = cache.offset();
    model.append(cache, count);
    OutputView to =
        OutputView::dense(out.data().data(), 1, 6, kModelTokens, 24);
    to.data = to.row(0, 0, first);
    to.tokens = count;
    attend(queries.slice(first, count), cache.rows(1), options, to);
    cache.commit();
  }
  return out.data();
}

TEST_P(WindowLayerTest, AttendsWithTheSameBitsHoweverTheTokensAreSplit) {
  // The truth: a layer that keeps every row and masks the window.
  const Model global({{2, 16, 24, 0}, {2, 16, 24, 0}});
  SequenceCache all(global.layers, Policy::full(), global.options());
  const Model& model = model_;
  const auto want = [&] {
    const FloatTensor queries = test::random_floats(3, 1, 6, kModelTokens, 16);
    global.append(all, kModelTokens);
    std::vector<float> out(6 * kModelTokens * 24);
    AttentionOptions options;
    options.window = GetParam();
    attend(
        queries.view(),
        all.rows(1),
        options,
        OutputView::dense(out.data(), 1, 6, kModelTokens, 24));
    return bits_of(out);
  }();
  for (const std::size_t chunk : kChunks) {
    SequenceCache cache(model.layers, Policy::full(), model.options());
    EXPECT_EQ(bits_of(attend_in(model, cache, chunk)), want)
        << "micro-batches of " << chunk;
  }
}

TEST_P(WindowLayerTest, RollsBackLikeAnyOther) {
  SequenceCache cache(model_.layers, Policy::full(), model_.options());
  SequenceCache never(model_.layers, Policy::full(), model_.options());
  for (const std::size_t count : {70U, 1U, 100U, 64U}) {
    model_.append(cache, 65);
    cache.rollback();
    model_.feed(cache, {count});
    model_.feed(never, {count});
    ASSERT_EQ(contents_of(cache), contents_of(never));
  }
}

TEST_P(WindowLayerTest, StaysAsItWasWhenACommitExceedsTheLimit) {
  SequenceOptions options = model_.options();
  SequenceCache unlimited(model_.layers, Policy::full(), options);
  model_.feed(unlimited, {100});
  options.byte_limit = unlimited.stats().kv_bytes_peak + 1;
  SequenceCache cache(model_.layers, Policy::full(), options);
  model_.feed(cache, {100});
  const auto before = contents_of(cache);
  model_.append(cache, 200);
  EXPECT_THAT(
      error_of([&] { cache.commit(); }),
      IsError(ErrorKind::kMemoryLimit, "limit"));
  EXPECT_TRUE(cache.open());
  EXPECT_EQ(contents_of(cache), before);
  cache.rollback();
  model_.feed(cache, {1});
  model_.feed(unlimited, {1});
  EXPECT_EQ(contents_of(cache), contents_of(unlimited));
}

}  // namespace
}  // namespace qfilters
