// Distinct caches are independent: they may run at once, each with threads of
// its own, over the same rows and filters.
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/attention.h"
#include "qfilters/kv_cache.h"
#include "qfilters/sequence_cache.h"

#include "unit/kv_cache_fixture.h"
#include "unit/sequence_fixture.h"

namespace qfilters {
namespace {

using test::bits_of;
using test::contents_of;

constexpr int kThreads[] = {1, 2, 7};

/// Runs `work(i)` for every entry of kThreads, all at once.
template <typename Work>
void run_at_once(const Work& work) {
  std::vector<std::thread> runs;
  for (std::size_t i = 0; i < std::size(kThreads); ++i) {
    runs.emplace_back([&work, i] { work(i); });
  }
  for (std::thread& run : runs) {
    run.join();
  }
}

/// Attention over every update of one cache, with `threads` threads.
std::vector<float> attend_all(const test::LayerData& data, int threads) {
  Config config = test::config_of(20, 2, 4);
  QFiltersKVCache cache(config, data.filters);
  std::vector<float> all;
  for (const std::size_t count : test::chunks(120, 37)) {
    const RowsView rows = data.feed(cache, count);
    const auto queries =
        test::random_floats(5, data.batch, data.heads, count, data.dim);
    std::vector<float> out(data.groups() * count * data.value_dim);
    AttentionOptions options;
    options.threads = threads;
    attend(
        queries.view(),
        rows,
        options,
        OutputView::dense(
            out.data(), data.batch, data.heads, count, data.value_dim));
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

TEST(ThreadingTest, CachesThatRunAtOnceGiveTheSameBits) {
  const test::LayerData data;
  const auto want = bits_of(attend_all(data, 1));
  std::vector<std::vector<float>> got(std::size(kThreads));
  run_at_once([&](std::size_t i) { got[i] = attend_all(data, kThreads[i]); });
  for (const auto& out : got) {
    EXPECT_EQ(bits_of(out), want);
  }
}

TEST(ThreadingTest, SequencesOfOnePolicyThatRunAtOnceKeepTheSameRows) {
  const test::Model& model = test::two_layers();
  const Policy policy = test::qfilters_policy(model, test::budget(40, 2, 8, 5));
  const auto run = [&](int threads) {
    SequenceOptions options = model.options();
    options.threads = threads;
    SequenceCache cache(model.layers, policy, options);
    model.feed(cache, {100, 1, 33, 90});
    return contents_of(cache);
  };
  const auto want = run(1);
  std::vector<test::Contents> got(std::size(kThreads));
  run_at_once([&](std::size_t i) { got[i] = run(kThreads[i]); });
  for (const auto& contents : got) {
    EXPECT_EQ(contents, want);
  }
}

}  // namespace
}  // namespace qfilters
