#include "qfilters/config.h"

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"

#include "unit/test_util.h"

namespace qfilters {
namespace {

using test::error_of;
using test::IsError;

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();

// What validate() says about the defaults after `change`.
std::optional<Error> error_after(const std::function<void(Config&)>& change) {
  Config config;
  change(config);
  return error_of([&] { validate(config); });
}

auto is_invalid(const char* part) {
  return IsError(ErrorKind::kInvalidArgument, part);
}

TEST(ConfigTest, HasTheReferenceDefaults) {
  const Config config;
  EXPECT_EQ(config.qfilters_budget, 512);
  EXPECT_EQ(config.qfilters_n_sink, 4);
  EXPECT_EQ(config.qfilters_recent, 0);
  EXPECT_EQ(config.qfilters_calib_tokens, 128);
  EXPECT_EQ(config.qfilters_sign, 1);
  EXPECT_EQ(config.qfilters_min_retention, 0.9);
  EXPECT_EQ(config.qfilters_on_low_retention, "warn");
  EXPECT_EQ(config.use_metal_kernels, std::nullopt);
  EXPECT_EQ(config.qfilters_interval, 0);
  EXPECT_EQ(error_of([&] { validate(config); }), std::nullopt);
}

TEST(ConfigTest, AcceptsTheThreeReactionsToLowRetentionOnly) {
  const auto with = [](const char* action) {
    return error_after(
        [=](Config& c) { c.qfilters_on_low_retention = action; });
  };
  for (const char* action : {"warn", "raise", "ignore"}) {
    EXPECT_EQ(with(action), std::nullopt);
  }
  for (const char* action : {"", "Warn", "warn ", "None"}) {
    EXPECT_THAT(with(action), is_invalid(action));
    EXPECT_THAT(with(action), is_invalid("qfilters_on_low_retention"));
  }
}

TEST(ConfigTest, AcceptsARetentionFloorAboveZeroUpToOneOrNone) {
  const auto with = [](std::optional<double> floor) {
    return error_after([=](Config& c) { c.qfilters_min_retention = floor; });
  };
  EXPECT_EQ(with(std::nullopt), std::nullopt);
  EXPECT_EQ(with(1.0), std::nullopt);
  EXPECT_EQ(with(1e-300), std::nullopt);
  for (const double floor :
       {0.0,
        -0.5,
        1.0001,
        2.0,
        std::numeric_limits<double>::quiet_NaN(),
        std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(with(floor), is_invalid("qfilters_min_retention"));
  }
}

TEST(ConfigTest, AcceptsBothSignsOnly) {
  const auto with = [](std::int64_t sign) {
    return error_after([=](Config& c) { c.qfilters_sign = sign; });
  };
  EXPECT_EQ(with(1), std::nullopt);
  EXPECT_EQ(with(-1), std::nullopt);
  // 2^32 + 1 is 1 in 32 bits.
  for (const std::int64_t sign :
       {std::int64_t{0}, std::int64_t{2}, (std::int64_t{1} << 32) + 1, kMin}) {
    EXPECT_THAT(with(sign), is_invalid("qfilters_sign must be +1 or -1"));
    EXPECT_THAT(with(sign), is_invalid(std::to_string(sign).c_str()));
  }
}

TEST(ConfigTest, RejectsNegativeCountsWithNameAndValue) {
  EXPECT_THAT(
      error_after([](Config& c) { c.qfilters_n_sink = -1; }),
      is_invalid("qfilters_n_sink must be at least 0, got -1"));
  EXPECT_THAT(
      error_after([](Config& c) { c.qfilters_recent = kMin; }),
      is_invalid(
          "qfilters_recent must be at least 0, got -9223372036854775808"));
  EXPECT_THAT(
      error_after([](Config& c) { c.qfilters_calib_tokens = 0; }),
      is_invalid("qfilters_calib_tokens must be at least 1, got 0"));
  EXPECT_THAT(
      error_after([](Config& c) { c.qfilters_interval = -7; }),
      is_invalid("qfilters_interval must be at least 0, got -7"));
}

TEST(ConfigTest, RejectsABudgetThatSinksAndRecentRowsFill) {
  const auto with =
      [](std::int64_t budget, std::int64_t sink, std::int64_t recent) {
        return error_after([=](Config& c) {
          c.qfilters_budget = budget;
          c.qfilters_n_sink = sink;
          c.qfilters_recent = recent;
        });
      };
  EXPECT_EQ(with(8, 4, 3), std::nullopt);
  EXPECT_EQ(with(1, 0, 0), std::nullopt);
  EXPECT_THAT(with(8, 4, 4), is_invalid("qfilters_budget (8)"));
  EXPECT_THAT(with(8, 8, 0), is_invalid("qfilters_n_sink (8)"));
  EXPECT_THAT(with(0, 0, 0), is_invalid("qfilters_budget (0)"));
  EXPECT_THAT(with(-5, 0, 0), is_invalid("qfilters_budget (-5)"));
}

TEST(ConfigTest, DoesNotWrapAroundHugeCounts) {
  const auto with =
      [](std::int64_t budget, std::int64_t sink, std::int64_t recent) {
        return error_after([=](Config& c) {
          c.qfilters_budget = budget;
          c.qfilters_n_sink = sink;
          c.qfilters_recent = recent;
        });
      };
  EXPECT_THAT(with(8, kMax, 1), is_invalid("qfilters_budget"));
  EXPECT_THAT(with(8, kMax, kMax), is_invalid("qfilters_budget"));
  EXPECT_THAT(with(kMax, kMax - 1, kMax), is_invalid("qfilters_budget"));
  EXPECT_THAT(with(kMin, 0, 0), is_invalid("qfilters_budget"));
  EXPECT_EQ(with(kMax, kMax - 2, 1), std::nullopt);
}

TEST(ConfigTest, RefusesMetalOnlyWhenItIsRequired) {
  const auto with = [](std::optional<bool> metal) {
    return error_after([=](Config& c) { c.use_metal_kernels = metal; });
  };
  EXPECT_EQ(with(false), std::nullopt);
  EXPECT_THAT(
      with(true), IsError(ErrorKind::kUnsupported, "use_metal_kernels"));
}

TEST(ConfigTest, ReportsTheFirstFaultInTheReferenceOrder) {
  Config config;
  config.qfilters_on_low_retention = "x";
  config.qfilters_min_retention = 5.0;
  config.qfilters_sign = 3;
  config.qfilters_n_sink = -1;
  config.qfilters_budget = -2;
  config.use_metal_kernels = true;
  const auto fault = [&] { return error_of([&] { validate(config); }); };
  EXPECT_THAT(fault(), is_invalid("qfilters_on_low_retention"));
  config.qfilters_on_low_retention = "warn";
  EXPECT_THAT(fault(), is_invalid("qfilters_min_retention"));
  config.qfilters_min_retention.reset();
  EXPECT_THAT(fault(), is_invalid("qfilters_sign"));
  config.qfilters_sign = 1;
  EXPECT_THAT(fault(), is_invalid("qfilters_n_sink must be at least 0"));
  config.qfilters_n_sink = 0;
  EXPECT_THAT(fault(), is_invalid("qfilters_budget (-2)"));
  config.qfilters_budget = 8;
  EXPECT_THAT(fault(), IsError(ErrorKind::kUnsupported, "Metal"));
}

}  // namespace
}  // namespace qfilters
