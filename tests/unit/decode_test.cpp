#include "eval/tasks/decode.h"

#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/fake_session.h"
#include "unit/test_util.h"

namespace qfilters::eval {
namespace {

using llama::Logits;
using test::error_of;
using test::IsError;
using test::RecallSession;

std::vector<std::size_t> step_sizes(const RecallSession& session) {
  std::vector<std::size_t> sizes;
  for (const RecallSession::Step& step : session.steps())
    sizes.push_back(step.tokens);
  return sizes;
}

TEST(DecodeTest, FillsUpToEachContextAndDecodesThere) {
  RecallSession session(16, 1, 3.0F);
  const std::vector<Token> text(100, 7);
  std::vector<std::size_t> heard;
  const auto points =
      run_decode(session, text, {{20, 40}, 3}, [&](std::size_t done, auto all) {
        EXPECT_EQ(all, 43U);
        heard.push_back(done);
      });
  EXPECT_EQ(
      step_sizes(session),
      (std::vector<std::size_t>{16, 4, 1, 1, 1, 16, 1, 1, 1, 1}));
  EXPECT_EQ(
      heard,
      (std::vector<std::size_t>{16, 20, 21, 22, 23, 39, 40, 41, 42, 43}));
  ASSERT_EQ(points.size(), 2U);
  EXPECT_EQ(points[0].context, 20U);
  EXPECT_EQ(points[0].prefill_tokens, 20U);
  EXPECT_EQ(points[1].context, 40U);
  EXPECT_EQ(points[1].prefill_tokens, 37U) << "without those decoded at 20";
  EXPECT_GT(points[0].decode_seconds, 0);
  EXPECT_GE(points[1].prefill_seconds, points[0].prefill_seconds);
}

TEST(DecodeTest, RefusesContextsThatDoNotAscendAndShortTexts) {
  const auto refusal = [](const DecodeOptions& options) {
    return error_of([&] { check_decode_options(options); });
  };
  EXPECT_THAT(
      refusal({{}, 3}), IsError(ErrorKind::kInvalidArgument, "a context"));
  EXPECT_THAT(
      refusal({{8}, 0}), IsError(ErrorKind::kInvalidArgument, "a token"));
  EXPECT_THAT(
      refusal({{0, 8}, 3}), IsError(ErrorKind::kInvalidArgument, "context 0"));
  EXPECT_THAT(
      refusal({{8, 11}, 3}),
      IsError(ErrorKind::kInvalidArgument, "not beyond the 11 tokens"));
  EXPECT_FALSE(refusal({{8, 12}, 3}));
  constexpr std::size_t kHuge = ~std::size_t{0};
  for (const std::size_t huge : {kHuge, kHuge - 3, kHuge / 2}) {
    EXPECT_THAT(
        refusal({{8, huge}, 4}),
        IsError(ErrorKind::kInvalidArgument, "at most"));
    EXPECT_THAT(
        refusal({{8}, huge}), IsError(ErrorKind::kInvalidArgument, "at most"));
  }
  RecallSession session(16, 1, 3.0F);
  const std::vector<Token> text(14, 7);
  EXPECT_THAT(
      error_of([&] {
        (void)run_decode(session, text, {{8, 12}, 3});
      }),
      IsError(ErrorKind::kInvalidArgument, "14 tokens, but 15"));
  EXPECT_TRUE(session.steps().empty());
}

}  // namespace
}  // namespace qfilters::eval
