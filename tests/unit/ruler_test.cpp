#include "eval/tasks/ruler.h"

#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "eval/tasks/scoring.h"
#include "unit/fake_session.h"
#include "unit/test_util.h"

namespace qfilters::eval {
namespace {

using ::testing::ElementsAre;

using test::byte_codec;
using test::error_of;
using test::IsError;
using test::RecallSession;

const Haystack& haystack() {
  static const Haystack made([] {
    std::string text;
    while (text.size() < 6000)
      text += "The sea was calm. Nobody was there. ";
    return text;
  }());
  return made;
}

/// Sessions that recall what followed the last twelve bytes.
SessionFactory remembering(std::size_t memory = static_cast<std::size_t>(-1)) {
  return [memory](std::size_t) {
    return std::make_unique<RecallSession>(64, 12, 8.0F, memory);
  };
}

RulerOptions options(
    std::vector<std::string> tasks, std::vector<std::size_t> lengths) {
  RulerOptions out;
  out.tasks = std::move(tasks);
  out.lengths = std::move(lengths);
  out.samples = 2;
  out.seed = 5;
  return out;
}

/// One reader that streams; what it costs goes to `usage`.
RulerResult ruler_alone(
    const SessionFactory& open,
    const Codec& codec,
    const Haystack& haystack,
    const RulerOptions& options,
    const Progress& progress = {},
    Usage* usage = nullptr) {
  StreamingReader reader(open, codec);
  const std::vector<RulerResult> results =
      run_ruler(reader, codec, haystack, options, progress);
  if (usage != nullptr) *usage = reader.usage(0);
  return results.at(0);
}

TEST(ShareFoundTest, CountsReferencesWhateverTheirCase) {
  const std::vector<std::string> words{"Oslo", "b\xC3\xA4r", "17"};
  EXPECT_EQ(share_found("in OSLO, 17 B\xC3\xA4R", words), 1.0);
  EXPECT_EQ(share_found("oslO", words), 1.0 / 3);
  EXPECT_EQ(share_found("", words), 0.0);
  EXPECT_EQ(share_found("1 7", words), 0.0);
  EXPECT_EQ(share_found("anything", {}), 1.0);
}

TEST(RulerTest, APerfectMemoryFindsEveryNeedle) {
  Usage usage;
  const RulerResult result = ruler_alone(
      remembering(),
      byte_codec(),
      haystack(),
      options(
          {"niah_single_1", "niah_single_3", "niah_multikey_2"}, {2000, 2500}),
      {},
      &usage);
  ASSERT_EQ(result.cells.size(), 12U);
  for (const RulerCell& cell : result.cells) {
    EXPECT_EQ(cell.score, 1.0) << cell.task;
    EXPECT_EQ(cell.prediction, " " + cell.references[0]);
    EXPECT_LT(cell.nll_per_token, 0.1);
    EXPECT_EQ(cell.kept, 1.0);
  }
  // By length, task, sample.
  EXPECT_EQ(result.cells[3].task, "niah_single_3");
  EXPECT_EQ(result.cells[3].length, 2000U);
  EXPECT_EQ(result.cells[3].sample, 1U);
  EXPECT_EQ(result.cells[6].length, 2500U);
  EXPECT_EQ(usage.sessions, 12U);
}

TEST(RulerTest, AForgetfulMemoryLosesScoreAndLoss) {
  const RulerOptions asked = options({"niah_single_2"}, {2000});
  const auto mean = [&](std::size_t memory) {
    return ruler_means(
               ruler_alone(remembering(memory), byte_codec(), haystack(), asked)
                   .cells)
        .at(0);
  };
  EXPECT_EQ(mean(150).score, 0.0);
  EXPECT_GT(mean(150).nll_per_token, 1.0);
  EXPECT_EQ(mean(2000).score, 1.0);
}

TEST(RulerTest, RunsAllTasksByDefaultInSessionsOfTheLength) {
  std::vector<std::size_t> opened;
  std::vector<std::size_t> heard;
  RulerOptions all = options({}, {4000});
  all.samples = 1;
  const RulerResult result = ruler_alone(
      [&](std::size_t tokens) {
        opened.push_back(tokens);
        return std::make_unique<RecallSession>(4096, 12, 8.0F);
      },
      byte_codec(),
      haystack(),
      all,
      [&](std::size_t done, std::size_t total) {
        EXPECT_EQ(total, ruler_tasks().size());
        heard.push_back(done);
      });
  EXPECT_EQ(result.cells.size(), ruler_tasks().size());
  EXPECT_EQ(heard.size(), ruler_tasks().size());
  for (const std::size_t tokens : opened)
    EXPECT_EQ(tokens, 4000U);
  for (const RulerCell& cell : result.cells) {
    const RulerSample sample =
        ruler_sample_of(byte_codec(), haystack(), all, cell);
    EXPECT_EQ(sample.references, cell.references);
    EXPECT_EQ(sample.tokens, cell.tokens);
  }
}

TEST(RulerTest, MeansAreOfEachTaskAtEachLengthOrOverLengths) {
  std::vector<RulerCell> cells(4);
  cells[0] = {"a", 10, 0, 1.0, 2.0, "", {}};
  cells[1] = {"a", 10, 1, 0.0, 4.0, "", {}};
  cells[2] = {"b", 10, 0, 0.5, 1.0, "", {}};
  cells[3] = {"a", 20, 0, 1.0, 0.0, "", {}};
  const auto scores = [](const std::vector<RulerMean>& means) {
    std::vector<double> out;
    for (const RulerMean& mean : means)
      out.push_back(mean.score);
    return out;
  };
  EXPECT_THAT(scores(ruler_means(cells)), ElementsAre(0.5, 0.5, 1.0));
  EXPECT_EQ(ruler_means(cells)[0].nll_per_token, 3.0);
  EXPECT_THAT(
      scores(ruler_means(cells, true)),
      ElementsAre(testing::DoubleEq(2.0 / 3), 0.5));
}

TEST(RulerTest, RefusesBadOptions) {
  const auto refusal = [](const RulerOptions& bad) {
    return error_of([&] { check_ruler_options(bad); });
  };
  EXPECT_THAT(
      refusal(options({"niah"}, {1000})),
      IsError(ErrorKind::kInvalidArgument, "unknown task 'niah'; known: "));
  EXPECT_THAT(
      refusal(options({"vt", "vt"}, {1000})),
      IsError(ErrorKind::kInvalidArgument, "vt stands twice"));
  EXPECT_THAT(
      refusal(options({}, {})),
      IsError(ErrorKind::kInvalidArgument, "must not be empty"));
  EXPECT_THAT(
      refusal(options({}, {0})),
      IsError(ErrorKind::kInvalidArgument, "length 0"));
  EXPECT_THAT(
      refusal(options({}, {5, 5})),
      IsError(ErrorKind::kInvalidArgument, "length 5 stands twice"));
  EXPECT_THAT(
      refusal(options({}, {static_cast<std::size_t>(-1)})),
      IsError(ErrorKind::kInvalidArgument, "is not in 1.."));
  RulerOptions none = options({}, {1000});
  none.samples = 0;
  EXPECT_THAT(
      refusal(none), IsError(ErrorKind::kInvalidArgument, "samples: 0"));
  EXPECT_THAT(
      error_of([] {
        check_ruler_rooms(byte_codec(), haystack(), options({}, {5000, 100}));
      }),
      IsError(ErrorKind::kInvalidArgument, "length 100 has no room"));
}

}  // namespace
}  // namespace qfilters::eval
