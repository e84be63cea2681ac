#include "eval/tasks/perplexity.h"

#include <cmath>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "eval/tasks/scoring.h"
#include "unit/fake_session.h"
#include "unit/test_util.h"

namespace qfilters::eval {
namespace {

using ::testing::ElementsAre;

using llama::Logits;
using test::error_of;
using test::IsError;
using test::kBytes;
using test::RecallSession;

constexpr float kHeight = 3.0F;

// Loss of the token that the fake predicts, and of any other.
const double kSum = std::exp(3.0) + 255.0;
const double kRight = std::log(kSum) - 3.0;
const double kWrong = std::log(kSum);
// Float exponentials of a float64 sum: a few parts in 1e8.
constexpr double kBound = 1e-6;

/// 0 1 2 ... 9 0 1 2 ...: whatever follows a token always follows it.
std::vector<Token> counting(std::size_t tokens) {
  std::vector<Token> text(tokens);
  for (std::size_t i = 0; i < tokens; ++i) {
    text[i] = static_cast<Token>(i % 10);
  }
  return text;
}

PerplexityResult run(
    RecallSession& session,
    const std::vector<Token>& text,
    std::size_t tokens,
    std::size_t from,
    std::size_t decode) {
  return run_perplexity(session, text, kBytes, {tokens, from, decode});
}

TEST(PerplexityTest, IsTheExponentialOfTheMeanLoss) {
  RecallSession session(16, 1, kHeight);
  const PerplexityResult result = run(session, counting(110), 100, 20, 10);
  EXPECT_EQ(result.predictions, 79U);
  EXPECT_NEAR(result.mean_nll, kRight, kBound);
  EXPECT_NEAR(result.perplexity, std::exp(kRight), kBound * 20);
}

TEST(PerplexityTest, CountsPredictionsFromAPosition) {
  // At 40 comes a token that nothing predicts, and that predicts nothing.
  std::vector<Token> text = counting(60);
  text[40] = 99;
  RecallSession session(7, 1, kHeight);
  const PerplexityResult result = run(session, text, 50, 20, 0);
  EXPECT_EQ(result.predictions, 29U);
  EXPECT_NEAR(
      result.mean_nll, (27 * kRight + kWrong + std::log(256.0)) / 29, kBound);
}

TEST(PerplexityTest, GivesTheSameForEveryChunkSize) {
  std::vector<Token> text = counting(200);
  for (std::size_t i = 0; i < text.size(); i += 17) {
    text[i] = 200;
  }
  RecallSession whole(200, 1, kHeight);
  const PerplexityResult expected = run(whole, text, 200, 64, 0);
  for (const std::size_t chunk : {1U, 3U, 64U, 199U}) {
    RecallSession session(chunk, 1, kHeight);
    const PerplexityResult result = run(session, text, 200, 64, 0);
    EXPECT_EQ(result.mean_nll, expected.mean_nll) << chunk;
    EXPECT_EQ(result.predictions, expected.predictions) << chunk;
  }
}

TEST(PerplexityTest, CountsFromHalfOfAShortText) {
  RecallSession session(256, 1, kHeight);
  EXPECT_EQ(run(session, counting(100), 100, 768, 0).predictions, 50U);
  RecallSession shortest(256, 1, kHeight);
  EXPECT_EQ(run(shortest, counting(2), 2, 768, 0).predictions, 1U);
}

TEST(PerplexityTest, HasThePublishedNumberOfPredictions) {
  RecallSession session(256, 1, kHeight);
  EXPECT_EQ(run(session, counting(4096), 4096, 768, 0).predictions, 3327U);
}

TEST(PerplexityTest, AsksForLogitsOnlyWhereTheyCount) {
  RecallSession session(16, 1, kHeight);
  const PerplexityResult result = run(session, counting(42), 40, 20, 2);
  EXPECT_THAT(
      session.steps(),
      ElementsAre(
          RecallSession::Step{16, Logits::kNone},
          RecallSession::Step{16, Logits::kAll},
          RecallSession::Step{8, Logits::kAll},
          RecallSession::Step{1, Logits::kLast},
          RecallSession::Step{1, Logits::kLast}));
  EXPECT_EQ(result.prefill_tokens, 40U);
  EXPECT_EQ(result.decode_tokens, 2U);
  EXPECT_GT(result.prefill_seconds, 0.0);
  EXPECT_GT(result.decode_seconds, 0.0);
}

TEST(PerplexityTest, ReportsProgressToTheEnd) {
  RecallSession session(16, 1, kHeight);
  std::vector<std::size_t> done;
  (void)run_perplexity(
      session,
      counting(34),
      kBytes,
      {32, 8, 2},
      [&](std::size_t so_far, std::size_t total) {
        EXPECT_EQ(total, 34U);
        done.push_back(so_far);
      });
  EXPECT_THAT(done, ElementsAre(16, 32, 33, 34));
}

TEST(PerplexityTest, RefusesATextThatIsTooShort) {
  RecallSession session(16, 1, kHeight);
  EXPECT_THAT(
      error_of([&] { (void)run(session, counting(63), 60, 10, 4); }),
      IsError(
          ErrorKind::kInvalidArgument,
          "the text has 63 tokens, but 60 + 4 (decode timing) are needed"));
  EXPECT_THAT(
      error_of([&] { (void)run(session, counting(63), 1, 0, 0); }),
      IsError(ErrorKind::kInvalidArgument, "tokens=1"));
  EXPECT_TRUE(session.steps().empty());
}

TEST(ScoringTest, TakesTheMaximumOutOfTheSoftmax) {
  const std::vector<float> large{1000.0F, 1000.0F, -1000.0F};
  EXPECT_NEAR(negative_log_likelihood(large, 0), std::log(2.0), 1e-12);
  EXPECT_NEAR(negative_log_likelihood(large, 2), 2000 + std::log(2.0), 1e-9);
}

TEST(ScoringTest, RefusesATokenOutsideTheVocabulary) {
  const std::vector<float> logits{0.0F, 0.0F};
  for (const Token token : {-1, 2}) {
    EXPECT_THAT(
        error_of([&] { (void)negative_log_likelihood(logits, token); }),
        IsError(ErrorKind::kInvalidArgument, "is not below 2"));
  }
}

TEST(ScoringTest, PicksTheFirstOfEqualLogits) {
  EXPECT_EQ(greedy_choice(std::vector<float>{1.0F, 5.0F, 5.0F}), 1);
}

}  // namespace
}  // namespace qfilters::eval
