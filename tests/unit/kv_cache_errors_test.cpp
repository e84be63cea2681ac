// What a cache refuses, and what happens when too little is retained.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"
#include "qfilters/kv_cache.h"

#include "unit/kv_cache_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using test::config_of;
using test::error_of;
using test::HalfTensor;
using test::IsError;
using test::LayerData;

std::optional<Error> make(const Config& config, const LayerFilters& filters) {
  return error_of([&] { const QFiltersKVCache cache(config, filters); });
}

TEST(KVCacheErrorsTest, RejectsABadConfigBeforeBadFilters) {
  const LayerFilters bad{1, 2, {0, test::kNaN}};
  EXPECT_THAT(
      make(config_of(4, 4), bad),
      IsError(ErrorKind::kInvalidArgument, "qfilters_budget (4)"));
  EXPECT_THAT(
      make(config_of(8, 4), bad), IsError(ErrorKind::kInvalidArgument, "nan"));
}

TEST(KVCacheErrorsTest, RejectsFiltersThatAreNoMatrix) {
  for (const LayerFilters& bad :
       {LayerFilters{0, 4, {}},
        LayerFilters{2, 0, {}},
        LayerFilters{2, 2, {1, 2, 3}}}) {
    EXPECT_THAT(make(Config(), bad), IsError(ErrorKind::kShape, ""));
  }
}

TEST(KVCacheErrorsTest, RejectsAnotherHeadLayoutAndThenWorks) {
  const LayerData data;
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  const HalfTensor heads(DType::kBFloat16, 2, 2, 5, 20);
  const HalfTensor dims(DType::kBFloat16, 2, 3, 5, 16);
  EXPECT_THAT(
      error_of([&] { cache.update_and_fetch(heads.view(), heads.view()); }),
      IsError(
          ErrorKind::kMismatch,
          "keys [2, 2, 5, 20] do not fit filters [heads, dim] = [3, 20]"));
  EXPECT_THAT(
      error_of([&] { cache.update_and_fetch(dims.view(), dims.view()); }),
      IsError(ErrorKind::kMismatch, "[2, 3, 5, 16]"));
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(cache.full_seq_bytes(), 0U);
  // Not even the storage type is decided by a call that failed.
  EXPECT_EQ(data.feed(cache, 5).shape().dtype, DType::kFloat16);
}

TEST(KVCacheErrorsTest, NamesBothShapesOfKeysAndValuesThatDoNotMatch) {
  const LayerData data;
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  for (const bool fresh : {true, false}) {
    if (!fresh) data.feed(cache, 30);
    const std::uint64_t seen = cache.tokens_seen();
    const auto with = [&](const std::function<void(TensorView&)>& change) {
      TensorView values = data.values.slice(30, 5);
      change(values);
      return error_of(
          [&] { cache.update_and_fetch(data.keys.slice(30, 5), values); });
    };
    EXPECT_THAT(
        with([](TensorView& v) { v.tokens = 4; }),
        IsError(
            ErrorKind::kShape, "keys [2, 3, 5, 20] and values [2, 3, 4, 20]"));
    EXPECT_THAT(
        with([](TensorView& v) { v.heads = 1; }),
        IsError(ErrorKind::kShape, "values [2, 1, 5, 20]"));
    EXPECT_THAT(
        with([](TensorView& v) { v.batch = 1; }),
        IsError(ErrorKind::kShape, "values [1, 3, 5, 20]"));
    EXPECT_THAT(
        with([](TensorView& v) { v.dim = 0; }),
        IsError(ErrorKind::kShape, "values [2, 3, 5, 0]"));
    EXPECT_EQ(cache.empty(), fresh);
    EXPECT_EQ(cache.tokens_seen(), seen);
  }
}

TEST(KVCacheErrorsTest, RejectsShapesThatChangeLaterAndThenContinues) {
  const LayerData data;
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  QFiltersKVCache want(config_of(16, 4), data.filters);
  data.feed(cache, 30);
  data.feed(want, 30);
  const auto with = [&](const std::function<void(TensorView&)>& change) {
    TensorView keys = data.keys.slice(30, 5);
    TensorView values = data.values.slice(30, 5);
    change(keys);
    change(values);
    return error_of([&] { cache.update_and_fetch(keys, values); });
  };
  const auto is_shape = IsError(
      ErrorKind::kShape, "after batch=2 heads=3 key_dim=20 value_dim=20");
  EXPECT_THAT(with([](TensorView& v) { v.batch = 1; }), is_shape);
  EXPECT_THAT(with([](TensorView& v) { v.heads = 2; }), is_shape);
  EXPECT_THAT(with([](TensorView& v) { v.dim = 19; }), is_shape);
  EXPECT_EQ(cache.offset(), 30U);
  EXPECT_EQ(cache.tokens_seen(), want.tokens_seen());
  EXPECT_EQ(cache.full_seq_bytes(), want.full_seq_bytes());
  data.feed(cache, 20);
  data.feed(want, 20);
  EXPECT_EQ(cache.positions(4), want.positions(4));
}

TEST(KVCacheErrorsTest, RejectsAnEmptyBatch) {
  const LayerData data;
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  const HalfTensor none(DType::kFloat16, 0, 3, 5, 20);
  EXPECT_THAT(
      error_of([&] { cache.update_and_fetch(none.view(), none.view()); }),
      IsError(ErrorKind::kShape, "[0, 3, 5, 20]"));
  EXPECT_TRUE(cache.empty());
}

TEST(KVCacheErrorsTest, RejectsGroupsThatDoNotExist) {
  const LayerData data;
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  const auto is_invalid = [](const char* part) {
    return IsError(ErrorKind::kInvalidArgument, part);
  };
  EXPECT_THAT(
      error_of([&] { static_cast<void>(cache.positions(0)); }),
      is_invalid("group 0 of 0"));
  EXPECT_THAT(
      error_of([&] { static_cast<void>(cache.stored()); }),
      is_invalid("group 0 of 0"));
  data.feed(cache, 5);
  EXPECT_THAT(
      error_of([&] { static_cast<void>(cache.positions(6)); }),
      is_invalid("group 6 of 6"));
  EXPECT_THAT(
      error_of([&] { static_cast<void>(cache.scores(6)); }),
      is_invalid("group 6 of 6"));
}

// A cache of budget 9 with its warnings collected.
struct Watched {
  explicit Watched(const std::string& action, std::optional<double> floor)
      : cache(config(action, floor), data.filters) {
    cache.on_warning(
        [this](std::string_view text) { warnings.emplace_back(text); });
  }

  static Config config(const std::string& action, std::optional<double> floor) {
    Config out = config_of(9, 1);
    out.qfilters_on_low_retention = action;
    out.qfilters_min_retention = floor;
    return out;
  }

  void feed(std::size_t count) { data.feed(cache, count); }

  LayerData data;
  QFiltersKVCache cache;
  std::vector<std::string> warnings;
};

TEST(RetentionTest, WarnsOnceAtTheFirstUpdateBelowTheFloor) {
  Watched w("warn", 0.9);
  w.feed(9);
  w.feed(1);  // 9 of 10 is the floor itself
  EXPECT_THAT(w.warnings, IsEmpty());
  w.feed(1);
  ASSERT_THAT(w.warnings, SizeIs(1));
  EXPECT_THAT(w.warnings[0], HasSubstr("9 of 11 tokens"));
  EXPECT_THAT(w.warnings[0], HasSubstr("0.9"));
  w.feed(50);
  EXPECT_THAT(w.warnings, SizeIs(1));
}

TEST(RetentionTest, StaysQuietWhenIgnoredOrWithoutAFloor) {
  Watched ignored("ignore", 0.9);
  ignored.feed(100);
  EXPECT_THAT(ignored.warnings, IsEmpty());
  Watched none("raise", std::nullopt);
  none.feed(100);
  EXPECT_EQ(none.cache.offset(), 100U);
}

TEST(RetentionTest, NeedsNoHandler) {
  const LayerData data;
  QFiltersKVCache cache(Watched::config("warn", 0.9), data.filters);
  data.feed(cache, 100);
  EXPECT_EQ(cache.tokens_kept(), 9U);
}

TEST(RetentionTest, RaisesOnceAfterTheUpdateIsComplete) {
  Watched w("raise", 0.9);
  const LayerData& data = w.data;
  QFiltersKVCache want(config_of(9, 1), data.filters);
  w.feed(9);
  data.feed(want, 9);
  EXPECT_THAT(
      error_of([&] { w.feed(20); }),
      IsError(ErrorKind::kLowRetention, "9 of 29 tokens"));
  EXPECT_THAT(w.warnings, IsEmpty());
  data.feed(want, 20);
  for (int later = 0; later < 3; ++later) {
    EXPECT_EQ(w.cache.offset(), want.offset());
    EXPECT_EQ(w.cache.tokens_seen(), want.tokens_seen());
    EXPECT_EQ(w.cache.tokens_kept(), want.tokens_kept());
    EXPECT_EQ(w.cache.nbytes(), want.nbytes());
    EXPECT_EQ(w.cache.full_seq_bytes(), want.full_seq_bytes());
    EXPECT_EQ(w.cache.qfilters_kept_bytes(), want.qfilters_kept_bytes());
    for (std::size_t g = 0; g < data.groups(); ++g) {
      EXPECT_EQ(w.cache.positions(g), want.positions(g));
    }
    w.feed(7);
    data.feed(want, 7);
  }
}

TEST(RetentionTest, FiresAtOnceWhenTheFirstUpdateIsTooLong) {
  Watched w("warn", 1.0);
  w.feed(10);
  EXPECT_THAT(w.warnings, SizeIs(1));
}

TEST(RetentionTest, CountsRowsThatTheIntervalStillHolds) {
  Config config = Watched::config("raise", 0.9);
  config.qfilters_interval = 5;
  const LayerData data;
  QFiltersKVCache cache(config, data.filters);
  for (int i = 0; i < 13; ++i) {
    data.feed(cache, 1);
  }
  EXPECT_EQ(cache.tokens_kept(), 13U);
  EXPECT_THAT(
      error_of([&] { data.feed(cache, 1); }),
      IsError(ErrorKind::kLowRetention, "9 of 14 tokens"));
}

}  // namespace
}  // namespace qfilters
