#include "eval/tasks/reading.h"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/fake_session.h"
#include "unit/test_util.h"

namespace qfilters::eval {
namespace {

using test::byte_codec;
using test::error_of;
using test::IsError;
using test::RecallSession;

constexpr float kHeight = 8.0F;

/// Counts the sessions that it opens; they recall what followed eight bytes.
struct Opened {
  std::vector<std::size_t> tokens;

  SessionFactory factory(std::size_t memory = static_cast<std::size_t>(-1)) {
    return [this, memory](std::size_t wanted) {
      tokens.push_back(wanted);
      return std::make_unique<RecallSession>(16, 8, kHeight, memory);
    };
  }
};

const std::string kContext =
    "The colour of the door is green. The number of the house is 17.";

Inquiry inquire(
    const std::string& question,
    const std::string& answer,
    std::size_t generate = 20) {
  Inquiry inquiry = make_inquiry(byte_codec(), question, answer);
  inquiry.references = {answer.substr(1)};
  inquiry.generate = generate;
  return inquiry;
}

class ReadingTest : public ::testing::Test {
 protected:
  Reply ask(
      const Inquiry& inquiry,
      std::size_t memory = static_cast<std::size_t>(-1)) {
    const SessionFactory open = opened_.factory(memory);
    Reading reading(streaming_opener(open, context_, 200), codec_, usage_);
    return reading.ask(inquiry);
  }

  Codec codec_ = byte_codec();
  std::vector<Token> context_ = codec_.tokenize(kContext);
  Opened opened_;
  Usage usage_;
};

TEST_F(ReadingTest, PredictsWhatTheContextSays) {
  const Reply reply = ask(inquire(" Say: The colour of the door is", " green"));
  EXPECT_EQ(reply.prediction, " green");
  EXPECT_NEAR(reply.nll_per_token, std::log(std::exp(8.0) + 255.0) - 8.0, 1e-6);
  EXPECT_EQ(reply.kept, 1);
}

TEST_F(ReadingTest, NeedsNoSecondPassWhenTheAnswerIsTheGreedyOne) {
  (void)ask(inquire(" Say: The colour of the door is", " green"));
  EXPECT_EQ(opened_.tokens, (std::vector<std::size_t>{200}));
  EXPECT_EQ(usage_.prefill_tokens, kContext.size() + 31);
  EXPECT_EQ(usage_.decode_tokens, 5U);
}

TEST_F(ReadingTest, GeneratesFromTheQuestionWhenTheAnswerIsAnother) {
  const Inquiry inquiry = inquire(" Say: The colour of the door is", " red");
  const Reply reply = ask(inquiry);
  // Not teacher forced: the wrong reference leaves no trace.
  EXPECT_EQ(reply.prediction, " green. The number o");
  EXPECT_GT(reply.nll_per_token, 4);
  EXPECT_EQ(opened_.tokens.size(), 2U);  // the fake cannot be saved
  EXPECT_EQ(usage_.sessions, 2U);
  EXPECT_EQ(usage_.prefill_tokens, 2 * (kContext.size() + 31));
  EXPECT_EQ(usage_.decode_tokens, 3U + 19U);
}

TEST_F(ReadingTest, EndsWhenAllReferencesAreFound) {
  Inquiry inquiry = inquire(" Say: The colour of the door is", " red");
  inquiry.references = {"THE", "green"};
  EXPECT_EQ(ask(inquiry).prediction, " green. The");
}

TEST_F(ReadingTest, EndsAtATokenThatEndsAnswers) {
  codec_.is_end = [](Token token) { return token == '.'; };
  EXPECT_EQ(
      ask(inquire(" Say: The colour of the door is", " red")).prediction,
      " green");
}

TEST_F(ReadingTest, NeverGeneratesMoreThanAsked) {
  for (std::size_t most = 0; most < 7; ++most) {
    const Reply reply =
        ask(inquire(" Say: The colour of the door is", " green", most));
    EXPECT_EQ(reply.prediction, std::string(" green").substr(0, most));
  }
}

TEST_F(ReadingTest, AsksEachQuestionAsIfItWereTheOnlyOne) {
  const Inquiry first = inquire(" Say: The colour of the door is", " red");
  const Inquiry second = inquire(" Say: The number of the house is", " 17");
  const Reply alone = ask(second);
  const SessionFactory open = opened_.factory();
  Reading reading(streaming_opener(open, context_, 200), codec_, usage_);
  (void)reading.ask(first);
  const Reply after = reading.ask(second);
  EXPECT_EQ(after.prediction, alone.prediction);
  EXPECT_EQ(after.nll_per_token, alone.nll_per_token);
}

TEST_F(ReadingTest, AForgetfulCacheShowsInLossAndPrediction) {
  const Inquiry inquiry = inquire(" Say: The colour of the door is", " green");
  const Reply forgot = ask(inquiry, 40);
  EXPECT_EQ(forgot.prediction.find("green"), std::string::npos);
  EXPECT_GT(forgot.nll_per_token, ask(inquiry).nll_per_token);
  EXPECT_NEAR(
      forgot.kept,
      40.0 / static_cast<double>(context_.size() + inquiry.question.size()),
      1e-12);
}

TEST_F(ReadingTest, RefusesWhatTheVocabularyCannotSay) {
  for (const auto& [question, answer] :
       {std::pair("", "a"), std::pair("a", "")}) {
    EXPECT_THAT(
        error_of([&] { (void)make_inquiry(byte_codec(), question, answer); }),
        IsError(ErrorKind::kInvalidArgument, "no tokens"));
  }
}

}  // namespace
}  // namespace qfilters::eval
