// What the C API refuses because nobody has as much, and that a refusal leaves
// the rows of the last update to attend over.
#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/c_api.h"

#include "unit/c_api_fixture.h"

namespace qfilters {
namespace {

using test::c_cache;
using test::c_config;
using test::c_tensor;
using test::CCache;
using test::feed;
using test::read;
using test::sequence_config;

class CApiLimitsTest : public test::CApiTest {
 protected:
  // Over the rows of the cache's update of 30 tokens.
  [[nodiscard]] qf_status attend(std::int32_t threads = 1) {
    const qf_tensor queries = c_tensor(queries_.view());
    const qf_output out = qf_output_dense(numbers_.data(), 2, 3, 30, 20);
    qf_attention options;
    EXPECT_EQ(qf_attention_init(&options, sizeof(options)), QF_OK);
    options.threads = threads;
    return qf_cache_attend(cache_.get(), &queries, &options, &out);
  }

  test::FloatTensor queries_ = test::random_floats(1, 2, 3, 30, 20);
  std::vector<float> numbers_ = std::vector<float>(3600);
};

TEST_F(CApiLimitsTest, ShapesWhoseProductsWrapAreRefused) {
  const std::array<std::uint16_t, 64> numbers{};
  const auto update = [&](std::array<std::size_t, 4> s) {
    const CCache cache = c_cache(c_config(20, 2));
    const qf_tensor rows = {
        numbers.data(), QF_FLOAT16, s[0], s[1], s[2], s[3], 0, 0, 0};
    const qf_status status = qf_cache_update(cache.get(), &rows, &rows);
    qf_cache_stats stats;
    EXPECT_EQ(qf_cache_get_stats(cache.get(), &stats, sizeof(stats)), QF_OK);
    EXPECT_EQ(stats.batch, 0U);
    return status;
  };
  const std::size_t one = 1;
  refused(
      update({one << 32, one << 32, 1, 8}),
      QF_INVALID_ARGUMENT,
      "qf_cache_update",
      "batch=4294967296 kv_heads=4294967296");
  refused(
      update({1, one << 24, one << 30, one << 10}),
      QF_INVALID_ARGUMENT,
      "qf_cache_update",
      "kv_heads=16777216");
  refused(
      update({1, one << 20, one << 30, one << 20}),
      QF_OUT_OF_MEMORY,
      "qf_cache_update",
      "memory");
  for (const std::size_t batch : {one << 63, (one << 63) + 1}) {
    qf_sequence_config config = sequence_config();
    config.batch = batch;
    const qf_layer layer{2, 8, 8, 0};
    qf_sequence* made = nullptr;
    refused(
        qf_sequence_create(&layer, 1, "full", &config, nullptr, &made),
        QF_INVALID_ARGUMENT,
        "qf_sequence_create",
        "batch=" + std::to_string(batch));
    EXPECT_EQ(made, nullptr);
  }
}

TEST_F(CApiLimitsTest, HugeFiltersAreRefusedAtOnce) {
  const float one = 1;
  qf_filters* made = nullptr;
  const auto create = [&](std::size_t layers,
                          std::size_t heads,
                          std::size_t dim,
                          const std::string& part) {
    refused(
        qf_filters_create(&one, layers, heads, dim, nullptr, nullptr, &made),
        QF_SHAPE,
        "qf_filters_create",
        part);
    EXPECT_EQ(made, nullptr);
  };
  create(SIZE_MAX, 0, 0, "[0, 0]");
  create(SIZE_MAX, 1, 1, "18446744073709551615 layers");
  create(1, SIZE_MAX / 2, 4, "[9223372036854775807, 4]");
  create(1, 4, (std::size_t{1} << 62) + 1, "[4, 4611686018427387905]");
  refused(
      qf_filters_create(nullptr, SIZE_MAX, 0, 0, nullptr, nullptr, &made),
      QF_SHAPE,
      "qf_filters_create",
      "");
}

TEST_F(CApiLimitsTest, HugeNumbersOfThreadsAreRefused) {
  for (const std::int32_t threads : {513, INT_MAX, INT_MIN}) {
    const std::string part = "threads=" + std::to_string(threads);
    refused(attend(threads), QF_INVALID_ARGUMENT, "qf_cache_attend", part);
    qf_sequence_config config = sequence_config();
    config.threads = threads;
    const qf_layer layer{2, 8, 8, 0};
    qf_sequence* made = nullptr;
    refused(
        qf_sequence_create(&layer, 1, "full", &config, nullptr, &made),
        QF_INVALID_ARGUMENT,
        "qf_sequence_create",
        part);
  }
  EXPECT_EQ(attend(2), QF_OK);
}

TEST_F(CApiLimitsTest, CallsThatAreRefusedSettleNothing) {
  qf_cache* const c = cache_.get();
  std::size_t size = 0;
  std::vector<std::int32_t> positions(50);
  std::vector<float> floats(50);
  std::vector<std::uint16_t> halves(50);
  const auto buffers = [&](auto call, auto* out, std::size_t small) {
    EXPECT_EQ(call(c, 6, out, 50, &size), QF_INVALID_ARGUMENT);
    EXPECT_EQ(call(c, 0, out, small, &size), QF_INVALID_ARGUMENT);
    EXPECT_EQ(call(c, 0, out, small, nullptr), QF_INVALID_ARGUMENT);
    out = nullptr;
    EXPECT_EQ(call(c, 0, out, 5000, &size), QF_INVALID_ARGUMENT);
    EXPECT_EQ(call(c, 0, out, 0, &size), QF_OK);  // the size alone
    EXPECT_EQ(attend(), QF_OK) << qf_last_error();
  };
  buffers(qf_cache_positions, positions.data(), 19);
  EXPECT_EQ(size, 20U);
  buffers(qf_cache_scores, floats.data(), 19);
  EXPECT_EQ(size, 20U);
  buffers(qf_cache_keys, halves.data(), 50);
  EXPECT_EQ(size, 400U);
  buffers(qf_cache_values, halves.data(), 50);
  EXPECT_EQ(size, 400U);
  buffers(qf_cache_filter, floats.data(), 19);
  EXPECT_EQ(size, 20U);
  EXPECT_EQ(qf_cache_filter(c, 0, floats.data(), 50, &size), QF_OK);
  EXPECT_EQ(attend(), QF_OK) << qf_last_error();

  qf_mask mask;
  const auto make = [&](qf_mask* to, std::size_t tokens, std::size_t* count) {
    return qf_cache_make_mask(c, tokens, 1, 0, to, nullptr, 0, count);
  };
  refused(
      make(&mask, std::size_t{1} << 63, &size),
      QF_INVALID_ARGUMENT,
      "qf_cache_make_mask",
      "tokens=9223372036854775808 offset=30");
  EXPECT_EQ(make(&mask, INT32_MAX - 30, &size), QF_OUT_OF_MEMORY);
  EXPECT_EQ(make(nullptr, 3, &size), QF_INVALID_ARGUMENT);
  EXPECT_EQ(make(&mask, 3, nullptr), QF_INVALID_ARGUMENT);
  EXPECT_EQ(
      qf_cache_make_mask(c, 3, 1, 0, &mask, nullptr, 9, &size),
      QF_INVALID_ARGUMENT);
  EXPECT_EQ(make(&mask, 1, &size), QF_OK);  // no array
  EXPECT_EQ(qf_cache_save(c, nullptr, 0, nullptr), QF_INVALID_ARGUMENT);
  EXPECT_EQ(qf_cache_save(c, nullptr, 9, &size), QF_INVALID_ARGUMENT);
  EXPECT_EQ(qf_cache_restore(c, "junk", 4), QF_FILE);
  EXPECT_EQ(qf_cache_restore(c, nullptr, 4), QF_INVALID_ARGUMENT);
  EXPECT_EQ(attend(), QF_OK) << qf_last_error();
}

TEST_F(CApiLimitsTest, CallsThatSettleEndAttention) {
  qf_cache* const c = cache_.get();
  std::size_t size = 0;
  std::vector<std::int32_t> positions(20);
  std::vector<float> scores(20);
  std::vector<std::uint16_t> halves(400);
  std::vector<std::byte> saved;
  qf_mask mask;
  const std::function<qf_status()> calls[] = {
      [&] { return qf_cache_settle(c); },
      [&] { return qf_cache_positions(c, 0, positions.data(), 20, &size); },
      [&] { return qf_cache_scores(c, 0, scores.data(), 20, &size); },
      [&] { return qf_cache_keys(c, 0, halves.data(), 400, &size); },
      [&] { return qf_cache_values(c, 0, halves.data(), 400, &size); },
      [&] { return qf_cache_make_mask(c, 2, 0, 0, &mask, nullptr, 0, &size); },
      [&] { return qf_cache_save(c, nullptr, 0, &size); },
      [&] { return qf_cache_restore(c, saved.data(), saved.size()); }};
  for (const auto& call : calls) {
    if (saved.empty()) {
      const CCache other = c_cache(c_config(20, 2), filters_.get());
      EXPECT_EQ(feed(other.get(), data_, 0, 30), QF_OK);
      saved = read<std::byte>([&](auto... buffer) {
        return qf_cache_save(other.get(), buffer...);
      });
    }
    ASSERT_EQ(attend(), QF_OK) << qf_last_error();
    ASSERT_EQ(call(), QF_OK) << qf_last_error();
    refused(attend(), QF_INVALID_ARGUMENT, "qf_cache_attend", "settled");
    ASSERT_EQ(feed(c, data_, 30, 30), QF_OK);
  }
}

TEST_F(CApiLimitsTest, RestoringNeedsRoomForOldAndNewRows) {
  const qf_layer layer{2, 4, 4, 0};
  const std::array<std::uint16_t, 800> numbers{};
  const qf_tensor rows =
      qf_tensor_dense(numbers.data(), QF_FLOAT16, 1, 2, 100, 4);
  qf_sequence_config config = sequence_config();
  config.byte_limit = 5000;  // 2 groups * 2 blocks * 1024 bytes, once
  qf_sequence* made = nullptr;
  ASSERT_EQ(
      qf_sequence_create(&layer, 1, "full", &config, nullptr, &made), QF_OK);
  const test::CSequence sequence(made);
  ASSERT_EQ(qf_sequence_begin(made, 100), QF_OK);
  ASSERT_EQ(qf_sequence_append(made, 0, &rows, &rows), QF_OK);
  ASSERT_EQ(qf_sequence_commit(made), QF_OK) << qf_last_error();
  const auto saved = read<std::byte>(
      [&](auto... buffer) { return qf_sequence_save(made, buffer...); });
  const auto restore = [&] {
    return qf_sequence_restore(made, saved.data(), saved.size());
  };
  refused(restore(), QF_MEMORY_LIMIT, "qf_sequence_restore", "5000");
  std::size_t size = 0;
  EXPECT_EQ(qf_sequence_positions(made, 0, 1, nullptr, 0, &size), QF_OK);
  EXPECT_EQ(size, 100U);
  ASSERT_EQ(qf_sequence_clear(made), QF_OK);
  EXPECT_EQ(restore(), QF_OK) << qf_last_error();
}

}  // namespace
}  // namespace qfilters
