#include "eval/budget.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "unit/test_util.h"

namespace qfilters::eval {
namespace {

using test::error_of;
using test::IsError;

// SmolLM2-135M: 3 heads of 64 in 30 layers; a block of one head is 16 KiB.
const std::vector<LayerShape> kLayers(30, LayerShape{3, 64, 64, 0});
constexpr std::uint64_t kBlock = std::uint64_t{64} * (64 + 64) * 2;
constexpr std::uint64_t kAllHeads = kBlock * 3 * 30;

std::size_t rows(
    const std::string& text,
    std::size_t tokens = 4096,
    std::size_t interval = 0,
    std::uint64_t reserved = 0) {
  return budget_rows(parse_budget(text), tokens, kLayers, interval, reserved);
}

TEST(BudgetTest, TakesRowsAsTheyAre) {
  EXPECT_EQ(rows("512"), 512U);
  EXPECT_EQ(rows("512", 10), 512U);
  EXPECT_EQ(rows("512", 4096, 64), 512U);
}

TEST(BudgetTest, RoundsAShareUp) {
  EXPECT_EQ(rows("25%", 4096), 1024U);
  EXPECT_EQ(rows("25%", 4097), 1025U);
  EXPECT_EQ(rows("12.5%", 1000), 125U);
  EXPECT_EQ(rows("0.1%", 10), 1U);
  EXPECT_EQ(rows("100%", 77), 77U);
}

TEST(BudgetTest, TakesWholePercentsExactly) {
  for (int percent = 1; percent <= 100; ++percent) {
    EXPECT_EQ(
        rows(std::to_string(percent) + "%", 100),
        static_cast<std::size_t>(percent));
  }
}

TEST(BudgetTest, FillsMemoryWithWholeBlocks) {
  // 64 MiB hold 45 blocks of all heads (1.40625 MiB each).
  EXPECT_EQ(rows("64MiB"), 45U * 64);
  EXPECT_EQ(rows("1GiB"), 728U * 64);
  EXPECT_EQ(rows("1440KiB"), 64U);
  EXPECT_EQ(rows("1.5MiB"), 64U);
}

TEST(BudgetTest, RejectsMemoryOfLessThanAByte) {
  for (const char* text : {"0.0009KiB", "0.0000009MiB", "0.0000000009GiB"}) {
    EXPECT_THAT(
        error_of([&] { (void)parse_budget(text); }),
        IsError(ErrorKind::kInvalidArgument, "less than one byte"));
  }
  EXPECT_EQ(parse_budget("0.001KiB").amount, 1U);
}

TEST(BudgetTest, LeavesRoomForTheIntervalInMemory) {
  for (const std::size_t interval : {0U, 1U, 63U, 64U, 100U}) {
    const std::size_t budget = rows("64MiB", 4096, interval);
    const std::size_t blocks = (budget + interval + 63) / 64;
    EXPECT_LE(blocks * kAllHeads, 64ULL << 20U) << interval;
    // One row more would not fit.
    EXPECT_EQ(budget + interval, 45U * 64) << interval;
  }
}

TEST(BudgetTest, LeavesRoomForWhatIsTakenAnyway) {
  EXPECT_EQ(rows("64MiB", 4096, 0, 1), 45U * 64);
  EXPECT_EQ(rows("64MiB", 4096, 0, kAllHeads), 44U * 64);
  EXPECT_EQ(rows("64MiB", 4096, 64, 4 * kAllHeads), 40U * 64);
  EXPECT_THAT(
      error_of([] { (void)rows("4MiB", 4096, 0, 4ULL << 20U); }),
      IsError(ErrorKind::kInvalidArgument, "take 5536KiB here"));
}

TEST(BudgetTest, CountsTheBytesOfTheRowsAsTheyAreStored) {
  // An int8 row has 8 bytes of scales: 765 KiB a block of all heads.
  const Budget budget = parse_budget("1530KiB");
  EXPECT_EQ(budget_rows(budget, 1, kLayers, 0, 0, RowFormat::kInt8), 2U * 64);
  EXPECT_EQ(budget_rows(budget, 1, kLayers, 0, 0), 1U * 64);
}

TEST(BudgetTest, CountsGlobalLayersOnly) {
  std::vector<LayerShape> layers = kLayers;
  for (std::size_t l = 0; l < 15; ++l) {
    layers[l].window = 512;
  }
  const Budget budget = parse_budget("1440KiB");
  EXPECT_EQ(budget_rows(budget, 1, layers, 0, 0), 2U * 64);
}

TEST(BudgetTest, RefusesMemoryThatHoldsNoRow) {
  EXPECT_THAT(
      error_of([] { (void)rows("1439KiB"); }),
      IsError(ErrorKind::kInvalidArgument, "1439KiB leaves no row"));
  EXPECT_THAT(
      error_of([] { (void)rows("1440KiB", 4096, 64); }),
      IsError(ErrorKind::kInvalidArgument, "take 2880KiB here"));
  EXPECT_THAT(
      error_of([] { (void)rows("25%", 0); }),
      IsError(ErrorKind::kInvalidArgument, "leaves no row"));
  const std::vector<LayerShape> windowed(2, LayerShape{1, 64, 64, 512});
  EXPECT_THAT(
      error_of(
          [&] { (void)budget_rows(parse_budget("1GiB"), 1, windowed, 0, 0); }),
      IsError(ErrorKind::kInvalidArgument, "no layer"));
}

TEST(BudgetTest, RefusesWhatIsNoBudget) {
  for (const char* text :
       {"",
        "0",
        "-1",
        "abc",
        "%",
        "MiB",
        "0%",
        "101%",
        "nan",
        "inf",
        "1e3",
        "12.5",
        "64MB",
        "64mib",
        "25 %",
        " 5",
        "5 ",
        "99999999999",
        "99999999999GiB",
        "0x10"}) {
    EXPECT_THAT(
        error_of([&] { (void)parse_budget(text); }),
        IsError(ErrorKind::kInvalidArgument, "budget: '"))
        << text;
  }
}

TEST(BudgetTest, RemembersHowItWasGiven) {
  EXPECT_EQ(parse_budget("25%").text, "25%");
  EXPECT_EQ(Budget{}.text, std::to_string(Budget{}.amount));
}

}  // namespace
}  // namespace qfilters::eval
