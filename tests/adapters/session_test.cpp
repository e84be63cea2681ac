#include "llama/session.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"
#include "qfilters/policy.h"

#include "adapters/models.h"

namespace qfilters::llama {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::load_tiny;
using testing::RealModelTest;
using testing::some_tokens;

SessionOptions options_of(std::size_t chunk) {
  SessionOptions options;
  options.chunk = chunk;
  return options;
}

using SessionRealTest = RealModelTest;

TEST_F(SessionRealTest, PrefillsInChunksAndReportsEach) {
  const auto session =
      make_engine_session(model_, Policy::full(), options_of(16));
  std::vector<std::size_t> done;
  const std::size_t all = session->prefill(tokens(40), [&](std::size_t n) {
    done.push_back(n);
    return true;
  });
  EXPECT_EQ(all, 40U);
  EXPECT_EQ(done, (std::vector<std::size_t>{16, 32, 40}));
  EXPECT_NE(session->logits(7), nullptr) << "the last token of the last chunk";
  EXPECT_THROW((void)session->logits(6), Error);
  EXPECT_EQ(session->stats().tokens, 40U);
}

TEST_F(SessionRealTest, StopsAPrefillThatIsNotWantedAnyMore) {
  const auto session =
      make_engine_session(model_, Policy::full(), options_of(16));
  EXPECT_EQ(
      session->prefill(tokens(40), [](std::size_t) { return false; }), 16U);
  EXPECT_EQ(session->stats().tokens, 16U);
  EXPECT_EQ(session->prefill(tokens(40).subspan(16)), 24U);
  EXPECT_EQ(session->prefill({}), 0U);
}

TEST_F(SessionRealTest, CountsRowsAndBytesOfBothKinds) {
  constexpr std::size_t kRow = std::size_t{30} * 3 * (64 + 64) * 2;
  PolicyOptions options;
  options.budget = 64;
  const auto ours = make_engine_session(
      model_, Policy::make("streaming", options), options_of(32));
  ours->prefill(tokens(128));
  SessionStats stats = ours->stats();
  EXPECT_EQ(stats.rows_max, 64U);
  EXPECT_EQ(
      stats.rows_by_head,
      std::vector(30, std::vector<std::size_t>{64, 64, 64}));
  EXPECT_EQ(stats.kv_bytes_full, 128 * kRow);
  EXPECT_GE(stats.kv_bytes_peak, (64 + 256) * kRow);
  EXPECT_GT(stats.evictions, 0U);
  EXPECT_GT(stats.attention_seconds, 0);

  BaselineOptions baseline;
  baseline.context = 300;
  const auto theirs = make_baseline_session(model_, options_of(32), baseline);
  theirs->prefill(tokens(128));
  stats = theirs->stats();
  EXPECT_EQ(stats.tokens, 128U);
  EXPECT_EQ(stats.rows_min, 128U);
  EXPECT_EQ(stats.rows_max, 128U);
  EXPECT_TRUE(stats.rows_by_head.empty());
  EXPECT_EQ(stats.kv_bytes_full, 128 * kRow);
  EXPECT_EQ(stats.kv_bytes_peak, 512 * kRow) << "300 cells rounded up";
}

TEST_F(SessionRealTest, TheBaselineGoesOnAfterAnErrorWhereItWas) {
  BaselineOptions baseline;
  baseline.context = 256;
  const auto session = make_baseline_session(model_, options_of(200), baseline);
  session->prefill(tokens(200));
  const Error full =
      error_of([&] { session->step(tokens(257).subspan(200), Logits::kLast); });
  EXPECT_EQ(full.kind(), ErrorKind::kMemoryLimit);
  EXPECT_THAT(full.what(), HasSubstr("200 + 57"));
  const std::vector<Token> outside = {49152};
  EXPECT_EQ(
      error_of([&] { session->step(outside, Logits::kLast); }).kind(),
      ErrorKind::kInvalidArgument);
  EXPECT_EQ(session->stats().tokens, 200U);
  session->step(tokens(201).subspan(200), Logits::kLast);
  const float* logits = session->logits(0);
  const std::vector<float> after(logits, logits + model_->vocabulary());

  const auto clean = make_baseline_session(model_, options_of(200), baseline);
  clean->prefill(tokens(200));
  clean->step(tokens(201).subspan(200), Logits::kLast);
  logits = clean->logits(0);
  EXPECT_EQ(after, std::vector<float>(logits, logits + model_->vocabulary()));
}

TEST_F(SessionRealTest, TheBaselineChecksItsOptions) {
  const auto message = [&](const BaselineOptions& baseline) {
    const Error error = error_of(
        [&] { (void)make_baseline_session(model_, options_of(8), baseline); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    return std::string(error.what());
  };
  BaselineOptions baseline;
  baseline.context = 0;
  EXPECT_THAT(message(baseline), HasSubstr("context=0"));
  baseline = {};
  baseline.cache_type = "q3";
  EXPECT_THAT(message(baseline), HasSubstr("cache_type='q3'"));
  baseline.cache_type = "q8_0";
  EXPECT_THAT(message(baseline), HasSubstr("flash_attention"));
}

TEST_F(SessionRealTest, AQuantisedBaselineTakesAboutHalfTheBytes) {
  BaselineOptions baseline;
  baseline.context = 256;
  baseline.flash_attention = true;
  baseline.cache_type = "q8_0";
  const auto session = make_baseline_session(model_, options_of(64), baseline);
  session->prefill(tokens(64));
  // 32 values take 34 bytes.
  EXPECT_EQ(
      session->stats().kv_bytes_peak,
      std::size_t{256} * 30 * 3 * (64 + 64) * 34 / 32);
  EXPECT_EQ(
      session->stats().kv_bytes_full, std::size_t{64} * 30 * 3 * (64 + 64) * 2);
}

struct BytesCase {
  const char* name;
  const char* model;
  const char* cache_type;
  bool flash_attention;
};

class BaselineBytesTest : public ::testing::TestWithParam<BytesCase> {};

// llama.cpp itself logs what its cache tensors take, in hundredths of a MiB.
TEST_P(BaselineBytesTest, AreWhatLlamaCppAllocates) {
  const auto model = load_tiny(GetParam().model);
  if (model == nullptr) GTEST_SKIP() << "no Python to write tiny models";
  double logged = 0;
  set_log_handler([&](int, std::string_view line) {
    const std::size_t at = line.find("KV buffer size = ");
    double mib = 0;
    if (at != std::string_view::npos &&
        std::sscanf(
            std::string(line).c_str() + at, "KV buffer size = %lf", &mib) ==
            1) {
      logged += mib;
    }
  });
  BaselineOptions baseline;
  baseline.context = 20000;
  baseline.cache_type = GetParam().cache_type;
  baseline.flash_attention = GetParam().flash_attention;
  const auto session = make_baseline_session(model, options_of(32), baseline);
  set_log_handler(nullptr);
  const auto counted = static_cast<double>(session->stats().kv_bytes_peak);
  EXPECT_NEAR(counted / (1 << 20), logged, 0.02);
  session->prefill(some_tokens(*model, 40));
  EXPECT_NE(session->logits(7), nullptr);
}

INSTANTIATE_TEST_SUITE_P(
    Each,
    BaselineBytesTest,
    ::testing::Values(
        BytesCase{"f16", "llama_ok", "f16", false},
        BytesCase{"f16Flash", "llama_ok", "f16", true},
        BytesCase{"bf16", "llama_ok", "bf16", true},
        BytesCase{"windows", "gemma_swa", "f16", false}),
    [](const auto& test) { return std::string(test.param.name); });

std::vector<float> last_logits(Session& session, Token next) {
  session.step(std::vector<Token>{next}, Logits::kLast);
  const float* logits = session.logits(0);
  return {logits, logits + session.model().vocabulary()};
}

// A global and windowed layers, so that both kinds of rows are saved.
TEST(SessionStateTest, GoesOnBitForBit) {
  const auto model = load_tiny("gemma_swa");
  if (model == nullptr) GTEST_SKIP() << "no Python to write tiny models";
  PolicyOptions rows;
  rows.budget = 40;
  rows.protection = {4, 8};
  const Policy policy = Policy::make("knorm", rows);
  const auto tokens = some_tokens(*model, 150);
  const auto straight = make_engine_session(model, policy, options_of(32));
  straight->prefill(tokens);
  const Snapshot saved = straight->save();
  const auto resumed = make_engine_session(model, policy, options_of(16));
  resumed->prefill(std::span(tokens).first(20));  // replaced
  resumed->restore(saved);
  EXPECT_TRUE(std::ranges::equal(resumed->tokens(), tokens));
  EXPECT_EQ(resumed->stats().rows_max, straight->stats().rows_max);
  for (const Token next : {tokens[3], tokens[50]}) {
    EXPECT_EQ(last_logits(*resumed, next), last_logits(*straight, next));
  }
  EXPECT_EQ(resumed->save(), straight->save());
}

TEST(SessionStateTest, RefusesWhatIsNotItsOwnAndStaysAsItWas) {
  const auto model = load_tiny("llama_ok");
  const auto other = load_tiny("gemma_swa");
  if (model == nullptr) GTEST_SKIP() << "no Python to write tiny models";
  const auto tokens = some_tokens(*model, 40);
  const auto session =
      make_engine_session(model, Policy::full(), options_of(64));
  session->prefill(tokens);
  const Snapshot before = session->save();

  const auto refusal = [&](const Snapshot& saved) {
    const Error error = error_of([&] { session->restore(saved); });
    EXPECT_EQ(session->save(), before);
    return error;
  };
  const auto stranger =
      make_engine_session(other, Policy::full(), options_of(64));
  stranger->prefill(some_tokens(*other, 10));
  EXPECT_EQ(refusal(stranger->save()).kind(), ErrorKind::kMismatch);
  const auto bounded =
      make_engine_session(model, Policy::make("streaming", {}), options_of(64));
  EXPECT_EQ(refusal(bounded->save()).kind(), ErrorKind::kMismatch);
  EXPECT_THAT(
      refusal(Snapshot()).what(), HasSubstr("not that of a model's run"));

  Snapshot saved = before;
  saved.put_values<Token>("tokens", std::span(tokens).first(39));
  EXPECT_THAT(refusal(saved).what(), HasSubstr("39 tokens"));
  for (const Token outside : {-1, static_cast<Token>(model->vocabulary())}) {
    auto ids = tokens;
    ids.back() = outside;
    saved.put_values<Token>("tokens", ids);
    EXPECT_THAT(refusal(saved).what(), HasSubstr("outside the vocabulary"));
  }
  saved = before;
  saved.put_text("sequence", "damaged");
  EXPECT_EQ(refusal(saved).kind(), ErrorKind::kFile);
}

TEST(SessionStateTest, LlamaCppsOwnCacheHasNone) {
  const auto model = load_tiny("llama_ok");
  if (model == nullptr) GTEST_SKIP() << "no Python to write tiny models";
  const auto theirs = make_baseline_session(model, options_of(64), {});
  const auto ours = make_engine_session(model, Policy::full(), options_of(64));
  EXPECT_EQ(
      error_of([&] { (void)theirs->save(); }).kind(), ErrorKind::kUnsupported);
  EXPECT_EQ(
      error_of([&] { theirs->restore(ours->save()); }).kind(),
      ErrorKind::kUnsupported);
}

TEST(SessionStateTest, AFailedStepIsNotRemembered) {
  const auto model = load_tiny("llama_ok");
  if (model == nullptr) GTEST_SKIP() << "no Python to write tiny models";
  const auto session =
      make_engine_session(model, Policy::full(), options_of(8));
  EXPECT_THROW(session->step(some_tokens(*model, 9), Logits::kNone), Error);
  EXPECT_TRUE(session->tokens().empty());
}

}  // namespace
}  // namespace qfilters::llama
