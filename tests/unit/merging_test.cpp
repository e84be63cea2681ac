#include "qfilters/merging.h"

#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"
#include "qfilters/limits.h"
#include "qfilters/scoring.h"

#include "unit/test_util.h"

namespace qfilters {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using test::error_of;
using test::IsError;

// What a head of these scores, at positions 0, 1, ..., merges.
std::vector<Merge> merged(
    const CamOptions& options,
    const std::vector<float>& scores,
    const std::vector<std::uint32_t>& kept,
    std::size_t kv_head = 0) {
  std::vector<std::int32_t> positions(scores.size());
  std::iota(positions.begin(), positions.end(), 0);
  std::vector<Merge> out;
  make_cam_merger(options)->merge(
      {2, 1, kv_head, positions, scores, kept}, out);
  return out;
}

TEST(CamTest, SharesAValueAmongTheNextRowsThatStay) {
  // Rows 1, 3, 4 and 8 go; what is behind them is worth less.
  const std::vector<float> scores{9, 9, 3, 9, 9, 3, 3, 1, 9};
  EXPECT_THAT(
      merged({.targets = 2}, scores, {0, 2, 5, 6, 7}),
      ElementsAre(
          Merge{1, 1, 2, 0.5F}, Merge{3, 2, 2, 0.5F}, Merge{4, 2, 2, 0.5F}));
  // Where fewer rows stay behind, each gets no more.
  EXPECT_THAT(
      merged({.targets = 4}, scores, {0, 2, 5, 6, 7}),
      ElementsAre(
          Merge{1, 1, 4, 0.25F}, Merge{3, 2, 3, 0.25F}, Merge{4, 2, 3, 0.25F}));
}

TEST(CamTest, DropsWhatNothingLookedAt) {
  EXPECT_THAT(merged({.targets = 2}, {0, 0, 5, 5}, {2, 3}), IsEmpty());
  // 0 / 0, and nothing that could be a chance.
  EXPECT_THAT(merged({.targets = 2}, {0, 0, 0, 0}, {2, 3}), IsEmpty());
  const float nan = std::nanf("");
  EXPECT_THAT(merged({.targets = 2}, {nan, 1, 5, nan}, {2, 3}), IsEmpty());
  EXPECT_THAT(merged({.targets = 2}, {1, 1, 1}, {0, 1, 2}), IsEmpty());
  EXPECT_THAT(merged({.targets = 2}, {1, 1, 1}, {}), IsEmpty());
}

TEST(CamTest, MergesAsOftenAsTheScoreOverTheMeanOfTheTargets) {
  constexpr std::size_t kRows = 20000;
  for (const double wanted : {0.1, 0.5, 0.9}) {
    std::vector<float> scores(kRows, static_cast<float>(2 * wanted));
    scores.insert(scores.end(), {1, 3});  // their mean: 2
    const auto merges = merged({.targets = 2}, scores, {kRows, kRows + 1});
    EXPECT_NEAR(static_cast<double>(merges.size()) / kRows, wanted, 0.015);
  }
}

// Policy random of the same seed keeps the rows of the largest numbers.
TEST(CamTest, ChanceHasNothingToDoWithPolicyRandom) {
  constexpr std::size_t kRows = 20000;
  constexpr std::uint64_t kSeed = 5;
  const test::HalfTensor keys(DType::kFloat16, 1, 1, kRows, 1);
  std::vector<float> noise(kRows);
  make_random_scorer(kSeed)->score({2, 0, 0, keys.view(), 0}, noise);
  std::vector<std::uint32_t> kept;
  for (std::uint32_t row = 0; row < kRows; ++row) {
    if (noise[row] > 0.5F) kept.push_back(row);
  }
  std::vector<float> scores(kRows, 0.5F);
  for (const std::uint32_t row : kept)
    scores[row] = 1;
  std::vector<std::int32_t> positions(kRows);
  std::iota(positions.begin(), positions.end(), 0);
  std::vector<Merge> merges;
  make_cam_merger({.seed = kSeed})
      ->merge({2, 0, 0, positions, scores, kept}, merges);
  const auto gone = static_cast<double>(kRows - kept.size());
  EXPECT_NEAR(static_cast<double>(merges.size()) / gone, 0.5, 0.02);
}

TEST(CamTest, ChanceBelongsToTheRowAndTheSeed) {
  const std::vector<float> all(1002, 0.5F);
  std::vector<float> scores = all;
  scores[1000] = scores[1001] = 1;
  const auto rows = [&](const CamOptions& options,
                        const std::vector<std::uint32_t>& kept,
                        std::size_t head = 0) {
    std::vector<std::uint32_t> out;
    for (const Merge& merge : merged(options, scores, kept, head))
      out.push_back(merge.evicted);
    return out;
  };
  const CamOptions two{.targets = 2};
  const auto at_once = rows(two, {1000, 1001});
  EXPECT_EQ(rows(two, {1000, 1001}), at_once);
  EXPECT_NE(rows({.targets = 2, .seed = 1}, {1000, 1001}), at_once);
  EXPECT_NE(rows(two, {1000, 1001}, 1), at_once);
  // The first 500 stay for now: the others are as likely as before.
  std::vector<std::uint32_t> kept(500);
  std::iota(kept.begin(), kept.end(), 0);
  kept.insert(kept.end(), {1000, 1001});
  std::vector<std::uint32_t> later;
  for (const std::uint32_t row : at_once) {
    if (row >= 500) later.push_back(row);
  }
  EXPECT_EQ(rows(two, kept), later);
}

TEST(CamTest, SaysWhatItIsAndRefusesNoTargets) {
  const auto cam = make_cam_merger({.targets = 7, .seed = 3});
  EXPECT_EQ(cam->name(), "cam");
  EXPECT_TRUE(cam->attention());
  EXPECT_EQ(cam->identity(), "cam 7 3");
  for (const std::size_t targets : {std::size_t{0}, kMostSize + 1}) {
    EXPECT_THAT(
        error_of([&] { (void)make_cam_merger({.targets = targets}); }),
        IsError(
            ErrorKind::kInvalidArgument, "targets=" + std::to_string(targets)));
  }
}

}  // namespace
}  // namespace qfilters
