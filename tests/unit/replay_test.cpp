#include "eval/replay.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "policies/registry.h"
#include "unit/fake_capture.h"
#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters::eval {
namespace {

using test::contents_of;
using test::error_of;
using test::fake_capture;
using test::IsError;

constexpr std::size_t kContext = 200;

/// Two global layers and a windowed one between them.
const std::vector<LayerShape>& layers() {
  static const std::vector<LayerShape> shapes{
      {2, 16, 16, 0}, {2, 16, 16, 24}, {3, 24, 8, 0}};
  return shapes;
}

const llama::Capture& capture() {
  static const llama::Capture made = fake_capture(layers(), 2, kContext + 30);
  return made;
}

Policy policy_of(const std::string& name, std::size_t budget) {
  PolicyOptions options = test::budget(budget, 2, budget > 40 ? 32 : 4);
  options.block = name == "chunkkv" ? 10 : 1;
  return policies::make(name, options, nullptr, layers());
}

class ReplayTest : public ::testing::TestWithParam<const char*> {};

TEST_P(ReplayTest, OneShotKeepsTheVeryBudget) {
  Replay replay(capture(), kContext);
  const Policy policy = policy_of(GetParam(), 48);
  const auto cache = replay.one_shot(policy, RowFormat::kSame);
  EXPECT_EQ(cache->offset(), kContext);
  EXPECT_EQ(cache->stats().evictions, 1U);
  for (const std::size_t l : {0U, 2U}) {
    for (std::size_t h = 0; h < layers()[l].kv_heads; ++h) {
      EXPECT_EQ(cache->store(l).rows(h), policy.budget(l));
    }
  }
}

// With everything in one micro-batch both protocols are the same, and the
// scores are those that the rows were chosen by.
TEST_P(ReplayTest, OneShotIsStreamingInOneStepAndFollowsTheScores) {
  Replay replay(capture(), kContext);
  const Policy policy = policy_of(GetParam(), 48);
  const auto once = replay.one_shot(policy, RowFormat::kSame);
  const auto step = replay.streaming(policy, kContext, RowFormat::kSame);
  for (std::size_t l = 0; l < layers().size(); ++l) {
    const auto scores = replay.scores(policy, l);
    ASSERT_EQ(
        scores.size(), layers()[l].window == 0 ? layers()[l].kv_heads : 0);
    for (std::size_t h = 0; h < layers()[l].kv_heads; ++h) {
      const auto kept = once->store(l).positions(h);
      EXPECT_THAT(
          kept, ::testing::ElementsAreArray(step->store(l).positions(h)));
      if (scores.empty() || policy.options().block != 1) continue;
      std::vector<bool> stays(kContext);
      for (const std::int32_t p : kept) {
        stays[static_cast<std::size_t>(p)] = true;
      }
      const auto& protection = policy.options().protection;
      float least = INFINITY;
      float most = -INFINITY;
      for (std::size_t r = protection.sinks; r < kContext - protection.recent;
           ++r) {
        if (stays[r]) {
          least = std::min(least, scores[h][r]);
        } else {
          most = std::max(most, scores[h][r]);
        }
      }
      EXPECT_GE(least, most) << l << " " << h;
    }
  }
}

TEST_P(ReplayTest, ThreadsChangeNothing) {
  Replay one(capture(), kContext, 1);
  Replay two(capture(), kContext, 2);
  const Policy policy = policy_of(GetParam(), 48);
  EXPECT_EQ(
      contents_of(*one.one_shot(policy, RowFormat::kSame)),
      contents_of(*two.one_shot(policy, RowFormat::kSame)));
  EXPECT_EQ(
      contents_of(*one.streaming(policy, 32, RowFormat::kInt8)),
      contents_of(*two.streaming(policy, 32, RowFormat::kInt8)));
}

INSTANTIATE_TEST_SUITE_P(
    Each,
    ReplayTest,
    ::testing::Values(
        "streaming",
        "knorm",
        "random",
        "keydiff",
        "h2o",
        "tova",
        "snapkv",
        "pyramidkv",
        "chunkkv"));

TEST(ReplayTest, NamesTheQueriesThatAreMissing) {
  EXPECT_EQ(first_query_needed(Policy::full(), 90, true), 90U);
  EXPECT_EQ(first_query_needed(policy_of("knorm", 48), 90, true), 90U);
  EXPECT_EQ(first_query_needed(policy_of("tova", 48), 90, false), 89U);
  EXPECT_EQ(first_query_needed(policy_of("snapkv", 48), 90, false), 58U);
  EXPECT_EQ(first_query_needed(policy_of("snapkv", 48), 90, true), 0U);
  EXPECT_EQ(first_query_needed(policy_of("h2o", 48), 90, false), 0U);
  const llama::Capture late = fake_capture(layers(), 2, 90, 60);
  Replay replay(late, 90);
  EXPECT_NO_THROW(
      (void)replay.one_shot(policy_of("tova", 48), RowFormat::kSame));
  EXPECT_THAT(
      error_of([&] {
        (void)replay.one_shot(policy_of("snapkv", 48), RowFormat::kSame);
      }),
      IsError(ErrorKind::kInvalidArgument, "needs queries from token 58 on"));
  EXPECT_THAT(
      error_of([&] {
        (void)replay.streaming(policy_of("tova", 48), 32, RowFormat::kSame);
      }),
      IsError(ErrorKind::kInvalidArgument, "needs queries from token 0 on"));
}

TEST(ReplayTest, LastQueriesAloneGiveTheSameAttention) {
  const llama::Capture late = [] {
    llama::Capture cut = fake_capture(layers(), 2, kContext);
    for (llama::CapturedLayer& layer : cut.layers) {
      const std::size_t dim = layer.shape.key_dim;
      std::vector<float> last;
      for (std::size_t h = 0; h < layer.query_heads; ++h) {
        const auto end = layer.queries.begin() +
                         static_cast<std::ptrdiff_t>((h + 1) * kContext * dim);
        last.insert(
            last.end(), end - static_cast<std::ptrdiff_t>(40 * dim), end);
      }
      layer.queries = last;
    }
    cut.first_query = kContext - 40;
    return cut;
  }();
  const llama::Capture all = fake_capture(layers(), 2, kContext);
  Replay some(late, kContext);
  Replay whole(all, kContext);
  for (const char* name : {"tova", "snapkv"}) {
    EXPECT_EQ(
        contents_of(*some.one_shot(policy_of(name, 48), RowFormat::kSame)),
        contents_of(*whole.one_shot(policy_of(name, 48), RowFormat::kSame)));
  }
}

TEST(ReplayTest, ASecondReadingIsNotAmongWhatWasCaptured) {
  Replay replay(capture(), kContext);
  const Policy policy = policy_of("reconstruct", 48);
  const auto cache = replay.one_shot(policy, RowFormat::kSame);
  EXPECT_EQ(cache->store(0).rows(0), kContext) << "nothing goes before it";
  EXPECT_EQ(cache->unrehearsed(), kContext);
  EXPECT_THAT(
      error_of([&] { (void)replay.scores(policy, 0); }),
      IsError(ErrorKind::kInvalidArgument, "policy reconstruct reads the"));
}

TEST(ReplayTest, RefusesAContextThatWasNotCaptured) {
  for (const std::size_t context : {std::size_t{0}, capture().tokens + 1}) {
    EXPECT_THAT(
        error_of([&] { Replay(capture(), context); }),
        IsError(ErrorKind::kInvalidArgument, "tokens of the 230 captured"));
  }
}

}  // namespace
}  // namespace qfilters::eval
