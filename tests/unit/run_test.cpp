#include "eval/run.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "unit/test_util.h"

namespace qfilters::eval {
namespace {

using ::testing::ElementsAre;

using test::error_of;
using test::IsError;

const std::vector<LayerShape> kLayers(2, LayerShape{3, 64, 64, 0});

RunSpec spec(const std::string& policy, const std::string& budget) {
  RunSpec out;
  out.policy = policy;
  out.budget = parse_budget(budget);
  return out;
}

TEST(RunTest, KnowsThePoliciesInDocumentedOrder) {
  EXPECT_THAT(
      policy_names(),
      ElementsAre(
          "llama",
          "full",
          "auto",
          "qfilters",
          "streaming",
          "knorm",
          "random",
          "keydiff",
          "qfilters-keysvd",
          "expected",
          "h2o",
          "cam",
          "tova",
          "snapkv",
          "pyramidkv",
          "squeeze",
          "chunkkv",
          "reconstruct"));
}

TEST(RunTest, HasNoLimitsWhereEveryRowStays) {
  EXPECT_EQ(limits_of(spec("llama", "1"), 10, kLayers), std::nullopt);
  EXPECT_EQ(limits_of(spec("full", "1"), 10, kLayers), std::nullopt);
}

TEST(RunTest, ProtectsHalfOfTheBudgetAsRecentByDefault) {
  EXPECT_EQ(
      limits_of(spec("qfilters", "1024"), 10, kLayers),
      (Limits{1024, 4, 512, 64}));
  EXPECT_EQ(
      limits_of(spec("knorm", "25%"), 4096, kLayers),
      (Limits{1024, 4, 512, 64}));
  EXPECT_EQ(
      limits_of(spec("streaming", "1024"), 10, kLayers),
      (Limits{1024, 4, 0, 64}));
}

TEST(RunTest, HasDefaultsOfEachPolicysSource) {
  const auto recent = [](const std::string& policy) {
    return limits_of(spec(policy, "512"), 10, kLayers)->recent;
  };
  EXPECT_EQ(recent("h2o"), 256U);
  EXPECT_EQ(recent("tova"), 0U);
  for (const char* policy : {"snapkv", "pyramidkv", "chunkkv"})
    EXPECT_EQ(recent(policy), 32U);
  EXPECT_EQ(recent("reconstruct"), 128U);
  EXPECT_EQ(recent("auto"), 192U);
  // A quarter of small budgets and of large ones.
  const auto recent_of = [](const std::string& budget) {
    return limits_of(spec("auto", budget), 10, kLayers)->recent;
  };
  EXPECT_EQ(recent_of("64"), 16U);
  EXPECT_EQ(recent_of("256"), 96U);
  EXPECT_EQ(recent_of("400"), 168U);
  EXPECT_EQ(recent_of("1024"), 256U);

  // Fewer where other layers keep a window of the newest rows.
  auto windowed = kLayers;
  windowed.push_back({3, 64, 64, 512});
  const auto beside_windows = [&](const std::string& policy) {
    return limits_of(spec(policy, "512"), 10, windowed)->recent;
  };
  EXPECT_EQ(beside_windows("auto"), 64U);
  EXPECT_EQ(beside_windows("h2o"), 256U);
  EXPECT_EQ(beside_windows("reconstruct"), 128U);
  RunRecord record;
  record.spec = spec("chunkkv", "512");
  record.limits = Limits{};
  EXPECT_EQ(to_json(record)["block"], 10);
  record.spec.block = 3;
  EXPECT_EQ(to_json(record)["block"], 3);
  record.spec = spec("snapkv", "512");
  EXPECT_EQ(to_json(record)["block"], 1);
  EXPECT_EQ(to_json(record)["merge"], "none");
  record.spec.merge = "cam";
  EXPECT_EQ(to_json(record)["merge"], "cam");
  record.spec = spec("cam", "512");
  EXPECT_EQ(to_json(record)["merge"], "cam");
  record.spec.merge = "none";
  EXPECT_EQ(to_json(record)["merge"], "none");
}

TEST(RunTest, EvictsASixteenthOfTheBudgetAtATimeByDefault) {
  const auto limits = [](const std::string& budget) {
    return limits_of(spec("streaming", budget), 100, kLayers).value();
  };
  EXPECT_EQ(limits("2047").interval, 64U);
  EXPECT_EQ(limits("2048").interval, 128U);
  EXPECT_EQ(limits("4096").interval, 256U);
  // Memory bounds budget and interval together: 45 blocks of 64 rows and the
  // cells of a step.
  const std::size_t row_bytes = std::size_t{2} * 3 * (64 + 64) * 2;
  const std::string memory =
      std::to_string((45 * 64 + 256) * row_bytes / 1024) + "KiB";
  EXPECT_EQ(limits(memory).budget, 45U * 64 - 128);
  EXPECT_EQ(limits(memory).interval, 128U);
  RunSpec chosen = spec("streaming", "4096");
  chosen.interval = 0;
  EXPECT_EQ(limits_of(chosen, 100, kLayers)->interval, 0U);
}

TEST(RunTest, LetsTheDefaultNeverBeTheReasonOfARefusal) {
  EXPECT_EQ(
      limits_of(spec("qfilters", "6"), 10, kLayers), (Limits{6, 4, 1, 64}));
  EXPECT_EQ(
      limits_of(spec("qfilters", "5"), 10, kLayers), (Limits{5, 4, 0, 64}));
}

TEST(RunTest, RefusesABudgetOfProtectedRowsOnly) {
  RunSpec small = spec("qfilters", "100");
  small.recent = 96;
  EXPECT_THAT(
      error_of([&] { (void)limits_of(small, 10, kLayers); }),
      IsError(
          ErrorKind::kInvalidArgument,
          "budget: 100 rows must be more than sink (4) + recent (96)"));
  small.recent = 95;
  EXPECT_EQ(limits_of(small, 10, kLayers)->recent, 95U);
  small.recent = static_cast<std::size_t>(-1);
  EXPECT_TRUE(error_of([&] { (void)limits_of(small, 10, kLayers); }));
  EXPECT_TRUE(
      error_of([&] { (void)limits_of(spec("random", "4"), 10, kLayers); }));
}

TEST(RunTest, MemoryHoldsMoreInt8Rows) {
  // Two layers of 3 heads: 96 KiB a block of 16-bit rows, 51 KiB of int8.
  RunSpec memory = spec("streaming", "4MiB");
  const Limits same = limits_of(memory, 100, kLayers).value();
  memory.cache_type = "int8";
  const Limits int8 = limits_of(memory, 100, kLayers).value();
  // Beside llama.cpp's own 256 cells: 384 KiB.
  EXPECT_EQ(same.budget + same.interval, (4096U - 384) / 96 * 64);
  EXPECT_EQ(int8.budget + int8.interval, (4096U - 384) / 51 * 64);
}

TEST(RunTest, ChecksASpecWithoutAModel) {
  EXPECT_NO_THROW(check_spec(spec("llama", "512")));
  EXPECT_THAT(
      error_of([] { check_spec(spec("best", "512")); }),
      IsError(
          ErrorKind::kInvalidArgument, "unknown name 'best'; known: llama"));
  RunSpec bad = spec("full", "1");
  bad.protocol = "twice";
  EXPECT_THAT(
      error_of([&] { check_spec(bad); }),
      IsError(ErrorKind::kInvalidArgument, "known: streaming, one-shot"));
  bad.protocol = "one-shot";
  EXPECT_NO_THROW(check_spec(bad));
  bad.interval = 64;
  EXPECT_THAT(
      error_of([&] { check_spec(bad); }),
      IsError(ErrorKind::kInvalidArgument, "interval: 64, but"));
  bad = spec("full", "1");
  bad.chunk = 0;
  EXPECT_THAT(
      error_of([&] { check_spec(bad); }),
      IsError(ErrorKind::kInvalidArgument, "chunk: 0"));
  bad = spec("full", "1");
  bad.threads = 0;
  EXPECT_THAT(
      error_of([&] { check_spec(bad); }),
      IsError(ErrorKind::kInvalidArgument, "threads: 0"));
  bad.threads = 513;
  EXPECT_THAT(
      error_of([&] { check_spec(bad); }),
      IsError(ErrorKind::kInvalidArgument, "threads: 513 is not in 1..512"));
  bad = spec("full", "1");
  bad.cache_type = "int8";
  EXPECT_NO_THROW(check_spec(bad));
  bad.cache_type = "q8_0";
  EXPECT_THAT(
      error_of([&] { check_spec(bad); }),
      IsError(ErrorKind::kInvalidArgument, "'q8_0' is not one of f16, int8"));
  bad = spec("llama", "1");
  bad.llama_cache_type = "q8_0";
  EXPECT_THAT(
      error_of([&] { check_spec(bad); }),
      IsError(ErrorKind::kInvalidArgument, "needs flash attention"));
  bad.llama_flash_attention = true;
  EXPECT_NO_THROW(check_spec(bad));
}

TEST(RunTest, WritesEveryKeyOfTheContract) {
  RunRecord record;
  record.spec = spec("qfilters", "1024");
  record.limits = limits_of(record.spec, 4096, kLayers);
  record.model_name = "toy";
  record.layers = kLayers;
  record.stats.tokens = 4160;
  record.stats.rows_mean = 1040.5;
  record.stats.kv_bytes_peak = 7;
  record.stats.rows_by_head = {{1040, 1041}, {1039, 1042}};
  record.prefill_tokens = 4096;
  record.prefill_seconds = 32;
  record.decode_tokens = 64;
  const Json json = to_json(record);
  for (const char* key :
       {"policy",         "cache_type",    "budget",
        "sink",           "recent",        "interval",
        "chunk",          "threads",       "isa",
        "tokens",         "offset",        "rows_kept",
        "rows_kept_min",  "rows_kept_max", "evictions",
        "kv_bytes",       "seconds",       "tokens_per_second",
        "peak_rss_bytes", "model"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  EXPECT_EQ(json["cache_type"], "f16");
  EXPECT_EQ(json["budget"], 1024);
  EXPECT_EQ(json["recent"], 512);
  EXPECT_EQ(json["tokens"], 4160);
  EXPECT_EQ(json["offset"], 4160);
  EXPECT_EQ(json["rows_kept"], 1040.5);
  EXPECT_EQ(json["budget_asked"], "1024");
  EXPECT_EQ(json["rows_by_head"], (Json{{1040, 1041}, {1039, 1042}}));
  EXPECT_EQ(json["kv_bytes"], (Json{{"peak", 7}, {"full", 0}}));
  EXPECT_EQ(json["tokens_per_second"]["prefill"], 128.0);
  EXPECT_EQ(json["tokens_per_second"]["decode"], 0.0);
  EXPECT_GT(json["peak_rss_bytes"], 1 << 20);
  EXPECT_EQ(
      json["model"],
      (Json{
          {"name", "toy"}, {"layers", 2}, {"kv_heads", 3}, {"head_dim", 64}}));
}

TEST(RunTest, WritesNullForLimitsThatDoNotExist) {
  RunRecord record;
  record.spec.policy = "full";
  const Json json = to_json(record);
  for (const char* key :
       {"budget",
        "budget_asked",
        "sink",
        "recent",
        "interval",
        "rows_by_head"}) {
    EXPECT_TRUE(json.at(key).is_null()) << key;
  }
}

}  // namespace
}  // namespace qfilters::eval
