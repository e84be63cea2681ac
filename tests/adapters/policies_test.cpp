// Every policy in the engine: what it looks at arrives there, the budget holds,
// and micro-batches of any size run.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/attention.h"
#include "qfilters/error.h"
#include "qfilters/sequence_cache.h"

#include "adapters/models.h"
#include "llama/calibrate.h"
#include "llama/engine.h"
#include "policies/registry.h"

namespace qfilters::llama {
namespace {

using testing::error_of;
using testing::load_tiny;
using testing::read_text;
using testing::some_tokens;

SessionOptions options_of(std::size_t chunk) {
  SessionOptions options;
  options.chunk = chunk;
  return options;
}

/// The filters that a policy needs, of a short text.
std::shared_ptr<const FilterBank> filters_of(
    const std::string& name, const std::shared_ptr<const Model>& model) {
  const std::vector<Token> text = some_tokens(*model, 80);
  if (name == "expected") {
    return std::make_shared<const FilterBank>(
        calibrate_expected(model, text, {}, {}));
  }
  if (name == "squeeze") {
    return std::make_shared<const FilterBank>(
        calibrate_squeeze(model, text, {}, {}));
  }
  return nullptr;
}

Policy policy_of(
    const std::string& name,
    const std::shared_ptr<const Model>& model,
    std::size_t budget) {
  PolicyOptions options;
  options.budget = budget;
  options.protection = {2, 4};
  options.merger = policies::make_merger(policies::find(name)->merger, 0);
  return policies::make(
      name, options, filters_of(name, model), model->layer_shapes());
}

class PolicyInEngineTest
    : public ::testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  void SetUp() override {
    name_ = std::get<0>(GetParam());
    model_ = load_tiny(std::get<1>(GetParam()));
    if (model_ == nullptr) GTEST_SKIP() << "no Python to write tiny models";
    tokens_ = some_tokens(*model_, 200);
  }

  std::string name_;
  std::shared_ptr<const Model> model_;
  std::vector<Token> tokens_;
};

TEST_P(PolicyInEngineTest, HoldsTheBudgetInMicroBatchesOfAnySize) {
  constexpr std::size_t kBudget = 40;
  for (const std::size_t chunk : {1U, 7U, 24U, 64U}) {
    SCOPED_TRACE(chunk);
    const Policy policy = policy_of(name_, model_, kBudget);
    SequenceCache cache(model_->layer_shapes(), policy);
    Engine engine(model_, options_of(chunk));
    std::size_t done = 0;
    while (done < tokens_.size()) {
      const std::size_t count = std::min(chunk, tokens_.size() - done);
      engine.step(
          cache, std::span(tokens_).subspan(done, count), Logits::kLast);
      done += count;
      for (std::size_t l = 0; l < cache.layers(); ++l) {
        if (cache.layer_shape(l).window != 0) continue;
        for (std::size_t h = 0; h < cache.layer_shape(l).kv_heads; ++h) {
          ASSERT_EQ(cache.store(l).rows(h), std::min(done, policy.budget(l)));
          ASSERT_EQ(cache.store(l).positions(h).front(), 0);
          ASSERT_EQ(cache.store(l).positions(h).back() + 1, int(done));
        }
      }
    }
    EXPECT_EQ(cache.stats().non_finite_scores, 0U);
    const float* const logits = engine.logits((tokens_.size() - 1) % chunk);
    EXPECT_TRUE(std::all_of(logits, logits + model_->vocabulary(), [](float x) {
      return std::isfinite(x);
    }));
  }
}

TEST_P(PolicyInEngineTest, ABudgetThatIsNeverReachedChangesNothing) {
  const auto read = [&](const Policy& policy) {
    return read_text(
               *make_engine_session(model_, policy, options_of(24)), tokens_)
        .logits;
  };
  EXPECT_EQ(read(policy_of(name_, model_, 5000)), read(Policy::full()));
}

// What the cache was told is what another pair of eyes sees at the same nodes.
TEST_P(PolicyInEngineTest, ScoresRowsByTheAttentionOfTheirMicroBatch) {
  if (name_ != "h2o") GTEST_SKIP() << "its scores are sums over all queries";
  SequenceCache scored(model_->layer_shapes(), policy_of(name_, model_, 5000));
  SequenceCache plain(model_->layer_shapes(), Policy::full());
  Engine engine(model_, options_of(24));
  Engine watched(model_, options_of(24));
  std::vector<std::vector<std::vector<float>>> sums(scored.layers());
  watched.on_statistics(
      AttentionStatistics::Kind::kSum,
      0,
      [&](std::size_t layer, const AttentionStatistics& seen) {
        sums[layer].resize(seen.rows.size());
        for (std::size_t g = 0; g < seen.rows.size(); ++g) {
          sums[layer][g].resize(seen.rows[g].size());
          for (std::size_t r = 0; r < seen.rows[g].size(); ++r)
            sums[layer][g][r] += seen.rows[g][r];
        }
      });
  for (std::size_t done = 0; done < 72; done += 24) {
    const auto part = std::span(tokens_).subspan(done, 24);
    engine.step(scored, part, Logits::kNone);
    watched.step(plain, part, Logits::kNone);
  }
  for (std::size_t l = 0; l < scored.layers(); ++l) {
    if (scored.layer_shape(l).window != 0) continue;
    for (std::size_t h = 0; h < scored.layer_shape(l).kv_heads; ++h) {
      const auto scores = scored.store(l).scores(h);
      EXPECT_EQ(std::vector<float>(scores.begin(), scores.end()), sums[l][h]);
    }
  }
}

TEST_P(PolicyInEngineTest, AProbeLeavesScoresAsTheyWere) {
  SequenceCache cache(model_->layer_shapes(), policy_of(name_, model_, 40));
  Engine engine(model_, options_of(24));
  engine.step(cache, std::span(tokens_).first(24), Logits::kNone);
  const auto before = cache.save().encode();
  engine.step(
      cache,
      std::span(tokens_).subspan(24, 24),
      Logits::kNone,
      Engine::Mode::kProbe);
  EXPECT_EQ(cache.save().encode(), before);
}

INSTANTIATE_TEST_SUITE_P(
    Each,
    PolicyInEngineTest,
    ::testing::Combine(
        ::testing::Values(
            "keydiff",
            "qfilters-keysvd",
            "expected",
            "h2o",
            "cam",
            "tova",
            "snapkv",
            "pyramidkv",
            "squeeze",
            "chunkkv"),
        ::testing::Values("llama_ok", "gemma_swa", "softcap")),
    [](const auto& test) {
      std::string name =
          std::string(std::get<0>(test.param)) + "_" + std::get<1>(test.param);
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

TEST(PolicyEngineTest, RefusesTwoWhoAskForAttention) {
  const auto model = load_tiny("llama_ok");
  if (model == nullptr) GTEST_SKIP() << "no Python to write tiny models";
  const std::vector<Token> tokens = some_tokens(*model, 8);
  SequenceCache cache(model->layer_shapes(), policy_of("tova", model, 40));
  Engine engine(model, options_of(8));
  engine.on_statistics(
      AttentionStatistics::Kind::kMax,
      0,
      [](std::size_t, const AttentionStatistics&) {});
  const Error error =
      error_of([&] { engine.step(cache, tokens, Logits::kNone); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
  EXPECT_THAT(error.what(), ::testing::HasSubstr("policy tova needs"));
  EXPECT_EQ(cache.offset(), 0U);
  engine.on_statistics({}, 0, {});
  engine.step(cache, tokens, Logits::kNone);
  EXPECT_EQ(cache.offset(), 8U);
}

}  // namespace
}  // namespace qfilters::llama
