#include "llama/capture.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"
#include "qfilters/policy.h"

#include "adapters/models.h"
#include "eval/replay.h"
#include "llama/engine.h"
#include "policies/registry.h"
#include "unit/sequence_fixture.h"

namespace qfilters::llama {
namespace {

using test::contents_of;
using testing::error_of;
using testing::load_tiny;
using testing::some_tokens;

constexpr std::size_t kTokens = 96;

SessionOptions options_of(std::size_t chunk) {
  SessionOptions options;
  options.chunk = chunk;
  return options;
}

/// On each of the tiny models: plain, with windows, with a soft cap.
class CaptureTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    model_ = load_tiny(GetParam());
    if (model_ == nullptr) GTEST_SKIP() << "no Python to write tiny models";
    tokens_ = some_tokens(*model_, kTokens);
  }

  /// What the engine's cache holds after it has read the tokens.
  [[nodiscard]] std::unique_ptr<SequenceCache> read(
      const Policy& policy, std::size_t chunk) const {
    Engine engine(model_, options_of(chunk));
    auto cache =
        std::make_unique<SequenceCache>(model_->layer_shapes(), policy);
    for (std::size_t i = 0; i < kTokens; i += chunk) {
      const std::size_t count = std::min(chunk, kTokens - i);
      engine.step(*cache, std::span(tokens_).subspan(i, count), Logits::kNone);
    }
    return cache;
  }

  [[nodiscard]] Policy policy_of(const std::string& name) const {
    PolicyOptions options;
    options.budget = 40;
    options.protection = {2, 4};
    return policies::make(name, options, nullptr, model_->layer_shapes());
  }

  std::shared_ptr<const Model> model_;
  std::vector<Token> tokens_;
};

TEST_P(CaptureTest, HoldsWhatTheEnginesCacheHolds) {
  const Capture all = capture(model_, tokens_, kTokens, options_of(40));
  EXPECT_EQ(all.tokens, kTokens);
  const eval::Replay replay(all, kTokens);
  EXPECT_EQ(
      contents_of(*replay.streaming(Policy::full(), 40, RowFormat::kSame)),
      contents_of(*read(Policy::full(), 40)));
  EXPECT_EQ(
      all.kv_bytes_peak,
      read(Policy::full(), 40)->stats().kv_bytes_peak +
          native_kv_bytes(model_->layer_shapes(), 40));
}

// Positions alone: every layer is the engine's, rows of later layers aside,
// whose keys a bounded cache changes. Keys and attention: the first layer is.
TEST_P(CaptureTest, ReplaysWhatASessionKeepsWhileItStreams) {
  const Capture all = capture(model_, tokens_, 0, options_of(24));
  const eval::Replay replay(all, kTokens);
  for (const char* name : {"streaming", "random"}) {
    const auto own = replay.streaming(policy_of(name), 24, RowFormat::kSame);
    const auto engine = read(policy_of(name), 24);
    for (std::size_t l = 0; l < own->layers(); ++l) {
      EXPECT_THAT(
          own->store(l).positions(0),
          ::testing::ElementsAreArray(engine->store(l).positions(0)));
    }
  }
  for (const char* name : {"knorm", "keydiff", "h2o", "tova", "snapkv"}) {
    EXPECT_EQ(
        contents_of(*replay.streaming(policy_of(name), 24, RowFormat::kSame))
            .layers[0],
        contents_of(*read(policy_of(name), 24)).layers[0])
        << name;
  }
}

// One micro-batch in the engine is what one-shot means.
TEST_P(CaptureTest, OneShotIsAnEngineThatReadsAllAtOnce) {
  const Capture all = capture(model_, tokens_, 0, options_of(kTokens));
  eval::Replay replay(all, kTokens);
  for (const char* name :
       {"knorm", "keydiff", "h2o", "tova", "snapkv", "pyramidkv"}) {
    const auto own = replay.one_shot(policy_of(name), RowFormat::kSame);
    const auto engine = read(policy_of(name), kTokens);
    for (std::size_t l = 0; l < own->layers(); ++l) {
      for (std::size_t h = 0; h < own->layer_shape(l).kv_heads; ++h) {
        EXPECT_THAT(
            own->store(l).positions(h),
            ::testing::ElementsAreArray(engine->store(l).positions(h)))
            << name << " " << l;
      }
    }
  }
}

TEST_P(CaptureTest, ASessionGoesOnFromACompressedContext) {
  const Capture all = capture(model_, tokens_, kTokens, options_of(40));
  eval::Replay replay(all, kTokens);
  const auto cache = replay.one_shot(policy_of("knorm"), RowFormat::kSame);
  cache->set_policy(Policy::full());
  const auto session =
      make_engine_session(model_, Policy::full(), options_of(16));
  session->restore(session_state(*model_, *cache, tokens_));
  EXPECT_EQ(session->tokens().size(), kTokens);
  EXPECT_EQ(session->stats().rows_max, 40U);
  EXPECT_EQ(session->stats().evictions, 1U);
  session->step(std::span(tokens_).first(16), Logits::kLast);
  EXPECT_EQ(session->stats().rows_max, 56U) << "nothing more is evicted";
  const Error error = error_of([&] {
    (void)session_state(*model_, *cache, std::span(tokens_).first(9));
  });
  EXPECT_THAT(
      error.what(), ::testing::HasSubstr("9 tokens with a cache of 96"));
}

TEST_P(CaptureTest, KeepsQueriesFromTheTokenAskedFor) {
  const Capture all = capture(model_, tokens_, 0, options_of(40));
  const Capture late = capture(model_, tokens_, 50, options_of(40));
  EXPECT_EQ(late.first_query, 50U);
  for (std::size_t l = 0; l < all.layers.size(); ++l) {
    const TensorView a = all.queries(l, 50, kTokens - 50);
    const TensorView b = late.queries(l, 50, kTokens - 50);
    ASSERT_EQ(a.heads, b.heads);
    for (std::size_t h = 0; h < a.heads; ++h) {
      for (std::size_t t = 0; t < a.tokens; ++t) {
        const auto* x = static_cast<const float*>(a.row(0, h, t));
        const auto* y = static_cast<const float*>(b.row(0, h, t));
        EXPECT_TRUE(std::equal(x, x + a.dim, y)) << l << " " << h << " " << t;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Each, CaptureTest, ::testing::Values("llama_ok", "gemma_swa", "softcap"));

TEST(CaptureRulesTest, RefusesToReadNothing) {
  const Error error = error_of([] { (void)capture(nullptr, {}, 0, {}); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
  EXPECT_THAT(error.what(), ::testing::HasSubstr("no tokens"));
}

}  // namespace
}  // namespace qfilters::llama
