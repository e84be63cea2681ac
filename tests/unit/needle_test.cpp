#include "eval/tasks/needle.h"

#include <cmath>
#include <exception>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/fake_session.h"
#include "unit/test_util.h"

namespace qfilters::eval {
namespace {

using ::testing::HasSubstr;

using test::byte_codec;
using test::error_of;
using test::IsError;
using test::RecallSession;

constexpr float kHeight = 8.0F;

std::string text_of(const std::vector<Token>& tokens) {
  std::string text;
  for (const Token token : tokens) {
    text += static_cast<char>(token);
  }
  return text;
}

std::vector<Token> haystack(std::size_t bytes) {
  std::string text;
  while (text.size() < bytes) {
    text += "The sea was calm. Nobody was there. ";
  }
  return byte_codec().tokenize(text.substr(0, bytes));
}

NeedleOptions options(
    std::vector<std::size_t> lengths,
    std::vector<double> depths,
    std::vector<std::string> keys) {
  return {std::move(lengths), std::move(depths), std::move(keys)};
}

/// Sessions that recall what followed the last eight bytes.
SessionFactory remembering(std::size_t memory = static_cast<std::size_t>(-1)) {
  return [memory](std::size_t) {
    return std::make_unique<RecallSession>(64, 8, kHeight, memory);
  };
}

TEST(NeedleTest, HidesTheKeyAtTheEndOfTheNearestSentence) {
  const std::vector<Token> text = haystack(360);
  const NeedlePrompt prompt =
      make_needle_prompt(byte_codec(), text, 50, "12345");
  const std::string context = text_of(prompt.context);
  EXPECT_THAT(
      context,
      HasSubstr("was there. The secret number of the lighthouse is 12345. "
                "Remember it. The sea"));
  const double place = static_cast<double>(context.find(" The secret"));
  EXPECT_NEAR(place, 180, 18);
}

TEST(NeedleTest, PutsTheNeedleFirstAndLastAtTheEnds) {
  const std::vector<Token> text = haystack(100);
  const auto context = [&](double depth) {
    return text_of(
        make_needle_prompt(byte_codec(), text, depth, "12345").context);
  };
  EXPECT_TRUE(context(0).starts_with(" The secret number"));
  EXPECT_TRUE(context(100).ends_with("12345. Remember it."));
}

TEST(NeedleTest, HidesTheKeyAnywhereWithoutASentence) {
  const std::vector<Token> text = byte_codec().tokenize(std::string(100, 'x'));
  const std::string context =
      text_of(make_needle_prompt(byte_codec(), text, 30, "12345").context);
  EXPECT_EQ(context.find(" The secret"), 30U);
}

TEST(NeedleTest, StartsWithWhatTheModelWantsInFront) {
  const NeedlePrompt prompt =
      make_needle_prompt(byte_codec({7, 9}), haystack(50), 0, "12345");
  EXPECT_EQ(prompt.context[0], 7);
  EXPECT_EQ(prompt.context[1], 9);
  EXPECT_EQ(prompt.context[2], ' ');
}

TEST(NeedleTest, AsksAfterTheContextAndExpectsTheKey) {
  const NeedlePrompt prompt =
      make_needle_prompt(byte_codec(), haystack(50), 50, "12345");
  EXPECT_TRUE(text_of(prompt.question).ends_with("of the lighthouse is"));
  EXPECT_EQ(text_of(prompt.answer), " 12345");
}

TEST(NeedleTest, SplitsTheAnswerWhereTheVocabularyMergesIt) {
  Codec codec = byte_codec();
  const auto bytes = codec.tokenize;
  // "s 1" is one token, as a merge over the border would make it.
  codec.tokenize = [=](std::string_view text) {
    std::vector<Token> tokens = bytes(text);
    for (std::size_t i = 0; i + 2 < tokens.size(); ++i) {
      if (tokens[i] != 's' || tokens[i + 1] != ' ' || tokens[i + 2] != '1') {
        continue;
      }
      tokens[i] = 255;
      tokens.erase(
          tokens.begin() + static_cast<std::ptrdiff_t>(i) + 1,
          tokens.begin() + static_cast<std::ptrdiff_t>(i) + 3);
    }
    return tokens;
  };
  const NeedlePrompt prompt =
      make_needle_prompt(codec, haystack(50), 50, "12345");
  EXPECT_TRUE(text_of(prompt.question).ends_with("of the lighthouse i"));
  EXPECT_EQ(
      text_of(prompt.answer),
      "\xFF"
      "2345");
}

/// One reader that streams; what it costs goes to `usage`.
NeedleResult needle_alone(
    const SessionFactory& open,
    const Codec& codec,
    std::span<const Token> text,
    const NeedleOptions& options,
    Usage* usage = nullptr) {
  StreamingReader reader(open, codec);
  const std::vector<NeedleResult> results =
      run_needle(reader, codec, text, options);
  EXPECT_EQ(results.size(), 1U);
  if (usage != nullptr) *usage = reader.usage(0);
  return results.front();
}

TEST(NeedleTest, ScoresAPerfectMemory) {
  Usage usage;
  const NeedleResult result = needle_alone(
      remembering(),
      byte_codec(),
      haystack(500),
      options({400, 500}, {0, 50}, {"12345", "67890"}),
      &usage);
  ASSERT_EQ(result.cells.size(), 8U);
  EXPECT_EQ(result.accuracy, 1.0);
  // log(e^8 + 255) - 8, in float exponentials.
  const double loss = std::log(std::exp(8.0) + 255.0) - 8.0;
  for (const NeedleCell& cell : result.cells) {
    EXPECT_TRUE(cell.hit);
    EXPECT_NEAR(cell.nll_per_token, loss, 1e-6);
  }
  EXPECT_NEAR(result.mean_nll, loss, 1e-6);
  EXPECT_EQ(result.cells[2].length, 400U);
  EXPECT_EQ(result.cells[2].depth, 50.0);
  EXPECT_EQ(result.cells[1].key, "67890");
  EXPECT_EQ(usage.decode_tokens, 8U * 5);
}

TEST(NeedleTest, ScoresAForgetfulMemory) {
  // 200 bytes back reach past the question, but not to the start.
  const NeedleResult result = needle_alone(
      remembering(200),
      byte_codec(),
      haystack(500),
      options({500}, {0, 100}, {"12345"}));
  EXPECT_FALSE(result.cells[0].hit);
  EXPECT_TRUE(result.cells[1].hit);
  EXPECT_EQ(result.accuracy, 0.5);
  EXPECT_GT(result.cells[0].nll_per_token, result.cells[1].nll_per_token);
}

TEST(NeedleTest, LetsTheQuestionEnterInChunksOfItsOwn) {
  std::vector<RecallSession::Step> steps;

  struct Recorder final : llama::Session {
    RecallSession inner{64, 8, kHeight};
    std::vector<RecallSession::Step>* out;

    explicit Recorder(std::vector<RecallSession::Step>* o) : out(o) {}

    ~Recorder() override { *out = inner.steps(); }

    void run(std::span<const Token> tokens, llama::Logits logits) override {
      inner.step(tokens, logits);
    }

    [[nodiscard]] const float* logits(std::size_t i) const override {
      return inner.logits(i);
    }

    [[nodiscard]] std::size_t chunk() const noexcept override { return 64; }

    [[nodiscard]] llama::SessionStats stats() const override {
      return inner.stats();
    }

    [[nodiscard]] const llama::Model& model() const noexcept override {
      return inner.model();
    }
  };

  (void)needle_alone(
      [&](std::size_t) { return std::make_unique<Recorder>(&steps); },
      byte_codec(),
      haystack(100),
      options({100}, {50}, {"12345"}));
  const NeedlePrompt prompt =
      make_needle_prompt(byte_codec(), haystack(100), 50, "12345");
  std::size_t fed = 0;
  std::size_t i = 0;
  while (fed < prompt.context.size()) {
    fed += steps[i++].tokens;
  }
  EXPECT_EQ(fed, prompt.context.size());
  while (fed < prompt.context.size() + prompt.question.size()) {
    fed += steps[i++].tokens;
  }
  EXPECT_EQ(fed, prompt.context.size() + prompt.question.size());
  EXPECT_EQ(steps[i - 1].logits, llama::Logits::kLast);
  // All answer tokens but the last go in, one by one.
  EXPECT_EQ(steps.size() - i, prompt.answer.size() - 1);
}

TEST(NeedleTest, OpensSessionsForTheWholeSequence) {
  const NeedleOptions all = options({100, 200}, {50}, {"12345"});
  std::vector<std::size_t> opened;
  (void)needle_alone(
      [&](std::size_t tokens) {
        opened.push_back(tokens);
        return std::make_unique<RecallSession>(64, 8, kHeight);
      },
      byte_codec(),
      haystack(200),
      all);
  ASSERT_EQ(opened.size(), 2U);
  EXPECT_EQ(opened[1], opened[0] + 100);
  EXPECT_EQ(opened[1], needle_tokens(byte_codec(), all));
}

TEST(NeedleTest, HidesEachPhrasingAndAsksForIt) {
  std::set<std::string> questions;
  for (std::size_t i = 1; i <= needle_phrasings().size(); ++i) {
    const NeedlePrompt prompt =
        make_needle_prompt(byte_codec(), haystack(200), 50, "12345", i);
    const std::string context = text_of(prompt.context);
    EXPECT_EQ(context.find("12345"), context.rfind("12345"));
    EXPECT_NE(context.find("12345"), std::string::npos);
    EXPECT_EQ(context.find("{}"), std::string::npos);
    EXPECT_EQ(text_of(prompt.answer), " 12345");
    // What the question ends on stands before the key: recall can answer.
    const std::string question = text_of(prompt.question);
    EXPECT_NE(
        context.find(question.substr(question.size() - 8) + " 12345"),
        std::string::npos)
        << question;
    questions.insert(question);
  }
  EXPECT_EQ(questions.size(), needle_phrasings().size());
  EXPECT_GE(questions.size(), 4U);
}

TEST(NeedleTest, GoesThroughTextsAndPhrasings) {
  NeedleOptions grid = options({100, 200}, {0, 50}, {"12345"});
  grid.phrasings = {2, 5};
  grid.skips = {0, 36};
  EXPECT_EQ(needle_text_tokens(grid), 236U);
  const NeedleResult result =
      needle_alone(remembering(), byte_codec(), haystack(236), grid);
  ASSERT_EQ(result.cells.size(), 16U);
  for (const NeedleCell& cell : result.cells)
    EXPECT_TRUE(cell.hit) << cell.phrasing << " " << cell.depth;
  EXPECT_EQ(result.cells[1].phrasing, 5U);
  EXPECT_EQ(result.cells[7].skip, 0U);
  EXPECT_EQ(result.cells[8].skip, 36U);
  EXPECT_EQ(result.cells[8].phrasing, 2U);
}

TEST(NeedleTest, BeginsEachHaystackAtItsSkip) {
  struct Recorder final : llama::Session {
    std::string* out;

    explicit Recorder(std::string* o) : out(o) {}

    void run(std::span<const Token> tokens, llama::Logits) override {
      *out += text_of({tokens.begin(), tokens.end()});
    }

    [[nodiscard]] const float* logits(std::size_t) const override {
      static const std::vector<float> row(test::kBytes, 0.0F);
      return row.data();
    }

    [[nodiscard]] std::size_t chunk() const noexcept override { return 64; }

    [[nodiscard]] llama::SessionStats stats() const override { return {}; }

    [[nodiscard]] const llama::Model& model() const noexcept override {
      std::terminate();
    }
  };

  std::string seen;
  NeedleOptions one = options({20}, {100}, {"12345"});
  one.skips = {4};
  (void)needle_alone(
      [&](std::size_t) { return std::make_unique<Recorder>(&seen); },
      byte_codec(),
      haystack(24),
      one);
  EXPECT_TRUE(seen.starts_with("sea was calm. Nobody The secret")) << seen;
}

TEST(NeedleTest, RefusesBadOptions) {
  const auto refusal = [](NeedleOptions bad) {
    return error_of([&] {
      (void)needle_alone(remembering(), byte_codec(), haystack(100), bad);
    });
  };
  EXPECT_THAT(
      refusal(options({}, {1}, {"12345"})),
      IsError(ErrorKind::kInvalidArgument, "must not be empty"));
  EXPECT_THAT(
      refusal(options({0}, {1}, {"12345"})),
      IsError(ErrorKind::kInvalidArgument, "length of 0"));
  EXPECT_THAT(
      refusal(options({10}, {101}, {"12345"})),
      IsError(ErrorKind::kInvalidArgument, "not in 0..100"));
  EXPECT_THAT(
      refusal(options({10}, {std::nan("")}, {"12345"})),
      IsError(ErrorKind::kInvalidArgument, "not in 0..100"));
  for (const char* key : {"1234", "123456", "1234a", ""}) {
    EXPECT_THAT(
        refusal(options({10}, {1}, {key})),
        IsError(ErrorKind::kInvalidArgument, "not five digits"));
  }
  const auto grid = [](std::vector<std::size_t> phrasings,
                       std::vector<std::size_t> skips) {
    NeedleOptions out = options({90}, {1}, {"12345"});
    out.phrasings = std::move(phrasings);
    out.skips = std::move(skips);
    return out;
  };
  for (const std::size_t number : {0U, 7U}) {
    EXPECT_THAT(
        refusal(grid({1, number}, {0})),
        IsError(
            ErrorKind::kInvalidArgument,
            "phrasing " + std::to_string(number) + " is not in 1..6"));
  }
  EXPECT_THAT(
      refusal(grid({}, {0})),
      IsError(ErrorKind::kInvalidArgument, "must not be empty"));
  EXPECT_THAT(
      refusal(grid({1}, {})),
      IsError(ErrorKind::kInvalidArgument, "must not be empty"));
  EXPECT_THAT(
      refusal(grid({1}, {static_cast<std::size_t>(-1)})),
      IsError(ErrorKind::kInvalidArgument, "a skip of more than"));
  EXPECT_THAT(
      refusal(options({static_cast<std::size_t>(-1)}, {1}, {"12345"})),
      IsError(ErrorKind::kInvalidArgument, "a length of more than"));
  EXPECT_THAT(
      refusal(grid({1}, {11})),
      IsError(ErrorKind::kInvalidArgument, "100 tokens, but 101 are needed"));
  EXPECT_THAT(
      refusal(options({101}, {1}, {"12345"})),
      IsError(ErrorKind::kInvalidArgument, "100 tokens, but 101 are needed"));
}

}  // namespace
}  // namespace qfilters::eval
