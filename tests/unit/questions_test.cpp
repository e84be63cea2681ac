#include "eval/tasks/questions.h"

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "unit/fake_session.h"
#include "unit/test_util.h"

namespace qfilters::eval {
namespace {

using ::testing::ElementsAre;

using test::byte_codec;
using test::error_of;
using test::IsError;
using test::RecallSession;

class QuestionsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) /
              ("qfilters_questions_" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }

  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path write(
      const std::string& text, const char* name = "q.jsonl") const {
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return folder_ / name;
  }

  [[nodiscard]] std::optional<Error> refusal(const std::string& text) const {
    const std::filesystem::path path = write(text);
    return error_of([&] { (void)read_questions(path); });
  }

  std::filesystem::path folder_;
};

const std::string kGood =
    R"({"context": "A cat sat.", "question": "Who?", "answers": ["cat"]})"
    "\n";

TEST_F(QuestionsTest, ReadsEveryLine) {
  write("A long text.", "text.txt");
  const QuestionSet set = read_questions(write(
      kGood + "\n  \r\n" +
      R"({"context_file": "text.txt", "question": "What?", "answers": ["a", "b"], "id": {"x": [[1]]}})"
      "\n" +
      R"({"context": "A cat sat.", "question": "Did?", "answers": ["sit"], "answer_prefix": "It did"})"));
  EXPECT_THAT(set.contexts, ElementsAre("A cat sat.", "A long text."));
  ASSERT_EQ(set.entries.size(), 3U);
  EXPECT_EQ(set.entries[0].line, 1U);
  EXPECT_EQ(set.entries[1].line, 4U);
  EXPECT_EQ(set.entries[1].context, 1U);
  EXPECT_THAT(set.entries[1].answers, ElementsAre("a", "b"));
  EXPECT_EQ(set.entries[1].answer_prefix, "Answer:");
  EXPECT_EQ(set.entries[2].context, 0U);
  EXPECT_EQ(set.entries[2].answer_prefix, "It did");
}

TEST_F(QuestionsTest, NamesTheLineThatIsWrong) {
  for (
      const auto& [line, says] :
      std::vector<std::pair<std::string, std::string>>{
          {"{", "not JSON"},
          {"{\"context\": \"\xFF\"}", "not JSON in UTF-8"},
          {"[1]", "not a JSON object"},
          {"7", "not a JSON object"},
          {"{}", "no \"question\""},
          {R"({"question": 5})", "\"question\" is not text"},
          {R"({"question": " "})", "\"question\" holds an empty text"},
          {R"({"question": "q"})", "no \"answers\""},
          {R"({"question": "q", "answers": []})", "one or more"},
          {R"({"question": "q", "answers": "a"})", "one or more"},
          {R"({"question": "q", "answers": [""]})", "empty text"},
          {R"({"question": "q", "answers": [1]})", "is not text"},
          {R"({"question": "q", "answers": [["a"]]})", "answers"},
          {R"({"question": "q", "answers": ["a"]})", "give one of"},
          {R"({"question": "q", "answers": ["a"], "context": "c", "context_file": "f"})",
           "give one of"},
          {R"({"question": "q", "answers": ["a"], "context": ""})",
           "\"context\" holds an empty text"},
          {R"({"question": "q", "answers": ["a"], "context": "c", "answer_prefix": 1})",
           "\"answer_prefix\" is not text"},
          {std::string(17 << 20, '['), "longer than 16 MiB"},
          {std::string(1 << 20, '['), "not JSON"}}) {
    EXPECT_THAT(
        refusal(kGood + "\n" + line + "\n" + kGood),
        IsError(ErrorKind::kInvalidArgument, "q.jsonl line 3: "))
        << line.substr(0, 100);
    EXPECT_THAT(
        refusal(kGood + "\n" + line + "\n" + kGood),
        IsError(ErrorKind::kInvalidArgument, says));
  }
  EXPECT_THAT(
      refusal(" \n\n"),
      IsError(ErrorKind::kInvalidArgument, "holds no question"));
}

TEST_F(QuestionsTest, NamesAFileThatCannotBeRead) {
  EXPECT_THAT(
      refusal(R"({"question": "q", "answers": ["a"], "context_file": "gone"})"),
      IsError(ErrorKind::kFile, "q.jsonl line 1: cannot read "));
  EXPECT_THAT(
      refusal(
          R"({"question": "q", "answers": ["a"], "context_file": "/dev/zero"})"),
      IsError(ErrorKind::kFile, "no regular file"));
  write("\n", "empty.txt");
  EXPECT_THAT(
      refusal(
          R"({"question": "q", "answers": ["a"], "context_file": "empty.txt"})"),
      IsError(ErrorKind::kInvalidArgument, "empty.txt holds an empty text"));
  EXPECT_THAT(
      error_of([&] { (void)read_questions(folder_); }),
      IsError(ErrorKind::kFile, "no regular file"));
  EXPECT_THAT(
      error_of([&] { (void)read_questions(folder_ / "gone"); }),
      IsError(ErrorKind::kFile, "No such file"));
}

QuestionSet door_and_house() {
  QuestionSet set;
  set.contexts = {
      "The colour of the door is green. The house has number 17.",
      "The dog is called Rex."};
  set.entries.resize(3);
  set.entries[0] = {
      1, 0, "Which colour?", "The colour of the door is", {"green"}};
  set.entries[1] = {2, 1, "Which dog?", "The dog is called", {"Rex"}};
  set.entries[2] = {3, 0, "Which?", "The house has number", {"18", "17"}};
  return set;
}

/// One reader that streams.
QuestionsResult questions_alone(
    const SessionFactory& open,
    const Codec& codec,
    const QuestionSet& set,
    const QuestionsOptions& options) {
  StreamingReader reader(open, codec);
  return run_questions(reader, codec, set, options).at(0);
}

TEST(QuestionsRunTest, AsksInTheOrderOfTheFileAndReadsByContext) {
  std::vector<std::size_t> opened;
  const QuestionSet set = door_and_house();
  const QuestionsResult result = questions_alone(
      [&](std::size_t tokens) {
        opened.push_back(tokens);
        return std::make_unique<RecallSession>(32, 8, 8.0F);
      },
      byte_codec({1}),
      set,
      {12});
  ASSERT_EQ(result.cells.size(), 3U);
  EXPECT_EQ(result.cells[0].prediction, " green");
  EXPECT_EQ(result.cells[1].prediction, " Rex");
  EXPECT_EQ(result.cells[1].line, 2U);
  // One of two answers: found, but not all.
  EXPECT_EQ(result.cells[2].score, 1.0);
  EXPECT_EQ(result.cells[2].fraction, 0.5);
  EXPECT_DOUBLE_EQ(result.score, 1.0);
  EXPECT_DOUBLE_EQ(result.fraction, 2.5 / 3);
  EXPECT_GT(result.cells[2].nll_per_token, result.cells[0].nll_per_token);
  // Each session is for the longest question about its context.
  EXPECT_EQ(opened.front(), questions_tokens(byte_codec({1}), set, {12}));
  EXPECT_LT(opened.back(), opened.front());
}

TEST(QuestionsRunTest, CountsTheTokensOfTheLongestSequence) {
  const QuestionSet set = door_and_house();
  const std::size_t question =
      std::string("\n\nQuestion: Which colour?\nThe colour of the door is")
          .size();
  EXPECT_EQ(
      questions_tokens(byte_codec({1}), set, {100}),
      1 + set.contexts[0].size() + question + 100);
}

TEST(QuestionsRunTest, RefusesToGenerateNothing) {
  EXPECT_THAT(
      error_of([] { check_questions_options({0}); }),
      IsError(ErrorKind::kInvalidArgument, "0 tokens to generate"));
}

}  // namespace
}  // namespace qfilters::eval
