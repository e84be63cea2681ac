// save() and restore() of a QFiltersKVCache.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/error.h"
#include "qfilters/kv_cache.h"

#include "unit/kv_cache_fixture.h"

namespace qfilters {
namespace {

using test::config_of;
using test::LayerData;

void expect_equal(QFiltersKVCache& a, QFiltersKVCache& b) {
  EXPECT_EQ(a.offset(), b.offset());
  EXPECT_EQ(a.tokens_seen(), b.tokens_seen());
  EXPECT_EQ(a.tokens_kept(), b.tokens_kept());
  EXPECT_EQ(a.full_seq_bytes(), b.full_seq_bytes());
  EXPECT_EQ(a.qfilters_kept_bytes(), b.qfilters_kept_bytes());
  EXPECT_EQ(a.nbytes(), b.nbytes());
  const auto x = a.states();
  const auto y = b.states();
  ASSERT_EQ(x.size(), y.size());
  for (std::size_t g = 0; g < x.size(); ++g) {
    EXPECT_EQ(x[g].positions, y[g].positions);
    EXPECT_EQ(x[g].keys, y[g].keys);
    EXPECT_EQ(x[g].values, y[g].values);
    EXPECT_EQ(x[g].scores, y[g].scores);
    EXPECT_EQ(x[g].filter_dir, y[g].filter_dir);
  }
}

ErrorKind refusal(QFiltersKVCache& cache, const Snapshot& saved) {
  try {
    cache.restore(saved);
  } catch (const Error& error) {
    return error.kind();
  }
  ADD_FAILURE() << "restored";
  return ErrorKind::kRuntime;
}

TEST(CacheSnapshotTest, ContinuesBitForBitWithCalibratedFilters) {
  const LayerData data;
  QFiltersKVCache straight(config_of(20, 2, 4), data.filters);
  data.feed(straight, 50);
  QFiltersKVCache resumed(config_of(20, 2, 4), data.filters);
  resumed.restore(straight.save());
  expect_equal(straight, resumed);
  for (const std::size_t count : {1U, 9U, 30U}) {
    data.feed(straight, count);
    data.feed(resumed, count);
    expect_equal(straight, resumed);
  }
}

TEST(CacheSnapshotTest, ContinuesTheFallbackBeforeAndAfterItFroze) {
  const LayerData data;
  Config config = config_of(20, 2, 4);
  config.qfilters_calib_tokens = 40;
  for (const std::size_t first : {30U, 60U}) {
    QFiltersKVCache straight(config);
    data.feed(straight, first);
    QFiltersKVCache resumed(config);
    resumed.restore(straight.save());
    expect_equal(straight, resumed);
    data.feed(straight, 20);
    data.feed(resumed, 20);
    expect_equal(straight, resumed);
  }
}

TEST(CacheSnapshotTest, SavesACacheThatHasSeenNothing) {
  const LayerData data;
  QFiltersKVCache fresh(config_of(20, 2), data.filters);
  QFiltersKVCache used(config_of(20, 2), data.filters);
  data.feed(used, 30);
  used.restore(fresh.save());
  EXPECT_TRUE(used.empty());
  EXPECT_EQ(used.offset(), 0U);
}

TEST(CacheSnapshotTest, RemembersThatTheRetentionFloorHasFired) {
  const LayerData data;
  Config config = config_of(20, 2);
  config.qfilters_on_low_retention = "raise";
  config.qfilters_min_retention = 0.9;
  QFiltersKVCache cache(config, data.filters);
  EXPECT_THROW(data.feed(cache, 60), Error);
  QFiltersKVCache resumed(config, data.filters);
  resumed.restore(cache.save());
  EXPECT_NO_THROW(data.feed(resumed, 10));
}

TEST(CacheSnapshotTest, RefusesAnotherConfigOrOtherFilters) {
  const LayerData data;
  QFiltersKVCache cache(config_of(20, 2), data.filters);
  data.feed(cache, 30);
  const auto saved = cache.save();
  QFiltersKVCache budget(config_of(21, 2), data.filters);
  EXPECT_EQ(refusal(budget, saved), ErrorKind::kMismatch);
  LayerFilters other = data.filters;
  other.values.front() += 1.0F;
  QFiltersKVCache filters(config_of(20, 2), other);
  EXPECT_EQ(refusal(filters, saved), ErrorKind::kMismatch);
  QFiltersKVCache fallback(config_of(20, 2));
  EXPECT_EQ(refusal(fallback, saved), ErrorKind::kMismatch);
  EXPECT_TRUE(budget.empty() && filters.empty() && fallback.empty());
}

TEST(CacheSnapshotTest, RefusesDamagedDataAndStaysAsItWas) {
  const LayerData data;
  Config config = config_of(20, 2);
  config.qfilters_calib_tokens = 40;
  QFiltersKVCache cache(config);
  data.feed(cache, 60);
  const auto saved = cache.save();
  QFiltersKVCache target(config);
  data.feed(target, 11);
  QFiltersKVCache twin(config);
  data.feed(twin, 11);
  for (const char* part : {"cache", "sequence"}) {
    const auto whole = saved.values<char>(part);
    for (std::size_t size = 0; size < whole.size(); size += 31) {
      Snapshot damaged = saved;
      damaged.put_values<char>(part, std::span(whole).first(size));
      const ErrorKind kind = refusal(target, damaged);
      ASSERT_TRUE(kind == ErrorKind::kFile || kind == ErrorKind::kMismatch);
    }
  }
  EXPECT_EQ(refusal(target, Snapshot()), ErrorKind::kFile);
  expect_equal(target, twin);
}

TEST(CacheSnapshotTest, NeverTripsOverAFlippedByte) {
  const LayerData data;
  Config config = config_of(20, 2, 4);
  config.qfilters_calib_tokens = 40;
  const auto check = [&](QFiltersKVCache& cache, const Snapshot& damaged) {
    QFiltersKVCache target(config);
    try {
      target.restore(damaged);
    } catch (const Error& error) {
      ASSERT_TRUE(
          error.kind() == ErrorKind::kFile ||
          error.kind() == ErrorKind::kMismatch)
          << error.what();
      return;
    }
    // Rows carry no redundancy; what was accepted must be a cache.
    ASSERT_EQ(target.tokens_seen(), data.groups() * target.offset());
    ASSERT_EQ(target.full_seq_bytes(), cache.full_seq_bytes());
    ASSERT_EQ(target.stored().rows(0), cache.stored().rows(0));
  };
  for (const std::size_t tokens : {10U, 50U}) {
    QFiltersKVCache cache(config);
    data.feed(cache, tokens);
    const Snapshot saved = cache.save();
    for (const char* part : {"cache", "sequence"}) {
      const auto whole = saved.values<std::uint8_t>(part);
      for (std::size_t i = 0; i < whole.size(); i += 3) {
        SCOPED_TRACE(part + std::to_string(i));
        auto flipped = whole;
        flipped[i] ^= 0x11U;
        Snapshot damaged = saved;
        damaged.put_values<std::uint8_t>(part, flipped);
        check(cache, damaged);
      }
    }
  }
}

TEST(CacheSnapshotTest, RefusesHeadsThatHoldUnequalRows) {
  const LayerData data;
  Config config = config_of(20, 2, 4);
  config.qfilters_calib_tokens = 40;
  for (const std::size_t tokens : {10U, 50U}) {
    QFiltersKVCache cache(config);
    data.feed(cache, tokens);
    Snapshot saved = cache.save();
    auto bytes = saved.values<std::uint8_t>("sequence");
    // The last head's rows, behind their number, end the snapshot.
    const std::size_t rows = cache.tokens_kept();
    const std::size_t row_bytes =
        sizeof(std::int32_t) + sizeof(float) + 2 * (data.dim + data.value_dim);
    bytes.resize(bytes.size() - rows * row_bytes);
    std::fill(bytes.end() - sizeof(std::uint64_t), bytes.end(), 0);
    saved.put_values<std::uint8_t>("sequence", bytes);
    QFiltersKVCache target(config);
    EXPECT_EQ(refusal(target, saved), ErrorKind::kFile);
    EXPECT_TRUE(target.empty());
  }
}

}  // namespace
}  // namespace qfilters
