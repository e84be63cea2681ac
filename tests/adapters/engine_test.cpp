#include "llama/engine.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"
#include "qfilters/policy.h"
#include "qfilters/sequence_cache.h"

#include "adapters/models.h"

namespace qfilters::llama {
namespace {

using testing::distance;
using testing::error_of;
using testing::load_tiny;
using testing::read_text;
using testing::Reading;
using testing::RealModelTest;
using testing::some_tokens;

SessionOptions options_of(std::size_t chunk, int threads = 1) {
  SessionOptions options;
  options.chunk = chunk;
  options.threads = threads;
  return options;
}

Reading read_full(
    std::shared_ptr<const Model> model,
    std::span<const Token> tokens,
    const SessionOptions& options,
    std::size_t keep = 0) {
  return read_text(
      *make_engine_session(std::move(model), Policy::full(), options),
      tokens,
      keep);
}

Reading read_baseline(
    std::shared_ptr<const Model> model,
    std::span<const Token> tokens,
    bool flash_attention = false,
    std::size_t keep = 0) {
  BaselineOptions baseline;
  baseline.context = tokens.size();
  baseline.flash_attention = flash_attention;
  return read_text(
      *make_baseline_session(std::move(model), options_of(64), baseline),
      tokens,
      keep);
}

Policy streaming(std::size_t budget) {
  PolicyOptions options;
  options.budget = budget;
  return Policy::make("streaming", options);
}

class EngineRealTest : public RealModelTest {
 protected:
  [[nodiscard]] SequenceCache cache(Policy policy = Policy::full()) const {
    return {model_->layer_shapes(), std::move(policy)};
  }
};

// Quantised weights make ggml round activations to 8 bits, so that the last bit
// of an attention output can move a logit by a tenth. llama.cpp's two kinds of
// attention show how far apart equally good results lie: ours must not lie
// farther from its float32 softmax than that, with a third for chance.
TEST_F(EngineRealTest, ReadsLikeLlamaCppWhenNothingIsEvicted) {
  const Reading theirs = read_baseline(model_, tokens(300));
  const Reading flash = read_baseline(model_, tokens(300), true);
  const double apart = distance(flash, theirs);
  for (const std::size_t chunk : {1U, 64U, 256U}) {
    SCOPED_TRACE(chunk);
    const Reading ours = read_full(model_, tokens(300), options_of(chunk));
    EXPECT_NEAR(ours.mean_loss, theirs.mean_loss, 0.01);
    EXPECT_LT(distance(ours, theirs), apart * 4 / 3);
  }
}

TEST_F(EngineRealTest, MicroBatchesDoNotChangeABit) {
  const Reading small = read_full(model_, tokens(300), options_of(64));
  const Reading large = read_full(model_, tokens(300), options_of(256));
  EXPECT_EQ(small.logits, large.logits);
}

TEST_F(EngineRealTest, ThreadsDoNotChangeABit) {
  const Reading one = read_full(model_, tokens(200), options_of(64, 1));
  const Reading two = read_full(model_, tokens(200), options_of(64, 2));
  EXPECT_EQ(one.logits, two.logits);
}

TEST_F(EngineRealTest, ABudgetThatIsNeverReachedChangesNothing) {
  const Reading full = read_full(model_, tokens(200), options_of(64));
  const Reading bounded = read_text(
      *make_engine_session(model_, streaming(4096), options_of(64)),
      tokens(200));
  EXPECT_EQ(full.logits, bounded.logits);
}

TEST_F(EngineRealTest, KeepsTheBudgetAndTheTruePosition) {
  Engine engine(model_, options_of(64));
  SequenceCache bounded = cache(streaming(96));
  for (std::size_t done = 0; done < 320; done += 64) {
    engine.step(bounded, tokens(320).subspan(done, 64), Logits::kNone);
  }
  EXPECT_EQ(bounded.offset(), 320U);
  EXPECT_EQ(bounded.stats().rows_max, 96U);
  EXPECT_EQ(bounded.stats().rows_min, 96U);
  EXPECT_EQ(bounded.store(29).positions(2).back(), 319);
  EXPECT_GT(engine.attention_seconds(), 0);
  EXPECT_GT(engine.eviction_seconds(), 0);
}

TEST_F(EngineRealTest, AProbeLeavesTheCacheAsItWas) {
  Engine engine(model_, options_of(64));
  SequenceCache probed = cache(streaming(48));
  engine.step(probed, tokens(64), Logits::kNone);
  const SequenceStats before = probed.stats();
  const auto next = tokens(80).subspan(64);
  const auto last_logits = [&](Engine::Mode mode) {
    engine.step(probed, next, Logits::kLast, mode);
    const float* logits = engine.logits(15);
    return std::vector<float>(logits, logits + model_->vocabulary());
  };
  const std::vector<float> first = last_logits(Engine::Mode::kProbe);
  EXPECT_EQ(probed.offset(), 64U);
  EXPECT_EQ(probed.stats().rows_max, before.rows_max);
  EXPECT_EQ(probed.stats().kv_bytes, before.kv_bytes);
  EXPECT_EQ(probed.stats().evictions, before.evictions);
  EXPECT_EQ(last_logits(Engine::Mode::kProbe), first);
  EXPECT_EQ(last_logits(Engine::Mode::kCommit), first);
  EXPECT_EQ(probed.offset(), 80U);
}

TEST_F(EngineRealTest, AFailureInTheMiddleOfAStepChangesNothing) {
  Engine engine(model_, options_of(64));
  SequenceCache failing = cache();
  engine.step(failing, tokens(64), Logits::kNone);
  engine.on_node([](std::size_t layer, const AttentionNode&) {
    if (layer == 17) throw std::runtime_error("in layer 17");
  });
  const auto next = tokens(70).subspan(64);
  EXPECT_THROW(engine.step(failing, next, Logits::kLast), std::runtime_error);
  EXPECT_FALSE(failing.open());
  EXPECT_EQ(failing.offset(), 64U);
  EXPECT_THROW((void)engine.logits(5), Error) << "no logits of a failed step";

  engine.on_node(nullptr);
  engine.step(failing, next, Logits::kLast);
  const float* logits = engine.logits(5);
  const std::vector<float> after(logits, logits + model_->vocabulary());

  Engine untroubled(model_, options_of(64));
  SequenceCache clean = cache();
  untroubled.step(clean, tokens(64), Logits::kNone);
  untroubled.step(clean, next, Logits::kLast);
  logits = untroubled.logits(5);
  EXPECT_EQ(after, std::vector<float>(logits, logits + model_->vocabulary()));
}

TEST_F(EngineRealTest, ServesSeveralSequencesInTurn) {
  Engine engine(model_, options_of(32));
  SequenceCache first = cache();
  SequenceCache second = cache();
  engine.step(first, tokens(32), Logits::kNone);
  engine.step(second, tokens(64).subspan(32), Logits::kNone);
  engine.step(first, tokens(64).subspan(32), Logits::kLast);
  const float* logits = engine.logits(31);
  const std::vector<float> in_turn(logits, logits + model_->vocabulary());
  SequenceCache alone = cache();
  engine.step(alone, tokens(32), Logits::kNone);
  engine.step(alone, tokens(64).subspan(32), Logits::kLast);
  logits = engine.logits(31);
  EXPECT_EQ(in_turn, std::vector<float>(logits, logits + model_->vocabulary()));
}

TEST_F(EngineRealTest, RunningOutOfMemoryChangesNothing) {
  SequenceOptions limited;
  limited.byte_limit = 3 << 20;  // 30 layers x 3 heads x 2 blocks of 16 KiB
  SequenceCache small(model_->layer_shapes(), Policy::full(), limited);
  Engine engine(model_, options_of(64));
  engine.step(small, tokens(128).first(64), Logits::kNone);
  engine.step(small, tokens(128).subspan(64), Logits::kNone);
  const Error error = error_of(
      [&] { engine.step(small, tokens(192).subspan(128), Logits::kNone); });
  EXPECT_EQ(error.kind(), ErrorKind::kMemoryLimit);
  EXPECT_FALSE(small.open());
  EXPECT_EQ(small.offset(), 128U);
  engine.step(
      small, tokens(129).subspan(128), Logits::kLast, Engine::Mode::kProbe);
}

TEST_F(EngineRealTest, ChecksWhatItIsGiven) {
  Engine engine(model_, options_of(8));
  SequenceCache mine = cache();
  const auto kind_of = [&](std::vector<Token> tokens, SequenceCache& target) {
    return error_of([&] { engine.step(target, tokens, Logits::kLast); }).kind();
  };
  EXPECT_EQ(kind_of({}, mine), ErrorKind::kInvalidArgument);
  EXPECT_EQ(
      kind_of(std::vector<Token>(9, 1), mine), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind_of({1, -1}, mine), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind_of({1, 49152}, mine), ErrorKind::kInvalidArgument);
  SequenceCache other(
      std::vector<LayerShape>(30, LayerShape{3, 64, 32, 0}), Policy::full());
  EXPECT_EQ(kind_of({1}, other), ErrorKind::kMismatch);
  EXPECT_EQ(mine.offset(), 0U);
  EXPECT_THROW(Engine(model_, options_of(0)), Error);
  EXPECT_THROW(Engine(model_, options_of(8, 0)), Error);
  EXPECT_THROW(Engine(nullptr, options_of(8)), Error);
}

TEST_F(EngineRealTest, HasLogitsOnlyOfTheTokensAskedFor) {
  Engine engine(model_, options_of(8));
  SequenceCache mine = cache();
  EXPECT_THROW((void)engine.logits(0), Error) << "before the first step";
  engine.step(mine, tokens(8), Logits::kAll);
  EXPECT_NE(engine.logits(0), engine.logits(7));
  EXPECT_THROW((void)engine.logits(8), Error);
  engine.step(mine, tokens(8), Logits::kLast);
  EXPECT_NE(engine.logits(7), nullptr);
  EXPECT_THROW((void)engine.logits(6), Error);
  engine.step(mine, tokens(8), Logits::kNone);
  EXPECT_THROW((void)engine.logits(7), Error);
}

TEST_F(EngineRealTest, CountsOneMicroBatchOfLlamaCppsOwnCache) {
  // 30 layers, 3 heads of 64 + 64 values of 2 bytes; cells in steps of 256.
  const std::size_t cell = std::size_t{30} * 3 * (64 + 64) * 2;
  EXPECT_EQ(Engine(model_, options_of(1)).native_kv_bytes(), 256 * cell);
  EXPECT_EQ(Engine(model_, options_of(257)).native_kv_bytes(), 512 * cell);
}

// QK-norm, heads of 256, one KV head, and windows of 512 in most layers.
TEST(EngineGemmaTest, ReadsLikeLlamaCppBeyondItsWindow) {
  const std::filesystem::path path = testing::asset("gemma-3-270m-q4_k_m.gguf");
  const std::filesystem::path text = testing::asset("handbook.txt");
  if (!std::filesystem::exists(path) || !std::filesystem::exists(text)) {
    GTEST_SKIP() << "no " << path << " or no " << text << ": run `make assets`";
  }
  const auto model = Model::load(path);
  std::vector<Token> tokens =
      model->tokenize(testing::read_file(text).substr(0, 10000), true, false);
  tokens.resize(600);
  // A quarter of a million logits a token: keep few.
  constexpr std::size_t kKeep = 32;
  const Reading theirs = read_baseline(model, tokens, false, kKeep);
  const Reading flash = read_baseline(model, tokens, true, kKeep);
  const Reading ours = read_full(model, tokens, options_of(96), kKeep);
  EXPECT_NEAR(ours.mean_loss, theirs.mean_loss, 0.01);
  EXPECT_LT(distance(ours, theirs), distance(flash, theirs) * 4 / 3);
}

class EngineTinyTest : public ::testing::TestWithParam<const char*> {};

// Float32 weights, so logits are close as well. Windows of 32 tokens that slide
// far beyond their own length, in micro-batches that are shorter and longer
// than a window.
TEST_P(EngineTinyTest, ReadsLikeLlamaCpp) {
  const auto model = load_tiny(GetParam());
  if (model == nullptr) GTEST_SKIP() << "no Python to write tiny models";
  const std::vector<Token> tokens = some_tokens(*model, 200);
  const Reading theirs = read_baseline(model, tokens);
  for (const std::size_t chunk : {1U, 24U, 64U}) {
    SCOPED_TRACE(chunk);
    const Reading ours = read_full(model, tokens, options_of(chunk));
    EXPECT_NEAR(ours.mean_loss, theirs.mean_loss, 0.01);
    EXPECT_LT(distance(ours, theirs), 0.01);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Model,
    EngineTinyTest,
    ::testing::Values("llama_ok", "gemma_swa", "softcap"),
    [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace qfilters::llama
