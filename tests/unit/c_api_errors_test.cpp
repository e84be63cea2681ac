// What the C API refuses: a code and a text, never a crash or an exception.
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/c_api.h"

#include "unit/c_api_fixture.h"

namespace qfilters {
namespace {

using test::c_cache;
using test::c_config;
using test::c_tensor;
using test::CCache;
using test::CFilters;
using test::CSequence;
using test::feed;
using test::LayerData;
using test::positions_of;
using test::read;
using test::sequence_config;
using test::streaming_sequence;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

using CApiErrorsTest = test::CApiTest;

TEST_F(CApiErrorsTest, ABufferThatIsTooSmallIsNotTouched) {
  std::vector<std::int32_t> out(50, -7);
  std::size_t size = 0;
  refused(
      qf_cache_positions(cache_.get(), 0, out.data(), 19, &size),
      QF_INVALID_ARGUMENT,
      "qf_cache_positions",
      "capacity 19 is below the size 20");
  EXPECT_EQ(size, 20U);
  EXPECT_THAT(out, Each(-7));
  ASSERT_EQ(qf_cache_positions(cache_.get(), 0, out.data(), 50, &size), QF_OK);
  EXPECT_EQ(size, 20U);
  EXPECT_EQ(out[20], -7);
  char text[1] = {'x'};
  refused(
      qf_active_isa(text, 1, &size), QF_INVALID_ARGUMENT, "qf_active_isa", "");
  EXPECT_EQ(text[0], 'x');
}

TEST_F(CApiErrorsTest, StructsOfAnotherSizeAreRefused) {
  const auto refuse = [](qf_status status, const char* function) {
    refused(status, QF_INVALID_ARGUMENT, function, "struct_size");
  };
  qf_config config{};
  refuse(qf_config_init(&config, sizeof(config) + 8), "qf_config_init");
  qf_cache* cache = nullptr;
  refuse(qf_cache_create(&config, nullptr, 0, &cache), "qf_cache_create");
  qf_cache_stats stats;
  refuse(qf_cache_get_stats(cache_.get(), &stats, 8), "qf_cache_get_stats");
  qf_sequence_stats more;
  refuse(
      qf_sequence_get_stats(sequence_.get(), &more, 8),
      "qf_sequence_get_stats");
  qf_sequence_config options{};
  refuse(qf_sequence_config_init(&options, 0), "qf_sequence_config_init");
  const qf_layer layer{2, 4, 4, 0};
  qf_sequence* sequence = nullptr;
  refuse(
      qf_sequence_create(&layer, 1, "full", &options, nullptr, &sequence),
      "qf_sequence_create");
  qf_attention attention{};
  refuse(qf_attention_init(&attention, 4), "qf_attention_init");
  const qf_tensor queries = c_tensor(data_.keys.slice(0, 1));
  const qf_output out = qf_output_dense(nullptr, 0, 0, 0, 0);
  refuse(
      qf_cache_attend(cache_.get(), &queries, &attention, &out),
      "qf_cache_attend");
  EXPECT_EQ(cache, nullptr);
  EXPECT_EQ(sequence, nullptr);
}

TEST_F(CApiErrorsTest, FiltersThatMakeNoSenseAreRefused) {
  qf_filters* made = nullptr;
  std::array<float, 4> values{1, 2, 3, test::kNaN};
  const auto create =
      [&](std::size_t layers, std::size_t heads, std::size_t dim) {
        return qf_filters_create(
            values.data(), layers, heads, dim, nullptr, nullptr, &made);
      };
  refused(create(0, 1, 1), QF_SHAPE, "qf_filters_create", "layer");
  refused(create(1, 0, 4), QF_SHAPE, "qf_filters_create", "");
  refused(create(1, 2, 0), QF_SHAPE, "qf_filters_create", "");
  refused(create(1, 1, 4), QF_INVALID_ARGUMENT, "qf_filters_create", "");
  refused(
      qf_filters_create_layers(nullptr, 0, nullptr, nullptr, &made),
      QF_SHAPE,
      "qf_filters_create_layers",
      "");
  refused(
      qf_filters_load("gone/away.npz", nullptr, nullptr, &made),
      QF_FILE,
      "qf_filters_load",
      "gone/away.npz");
  EXPECT_EQ(made, nullptr);
  refused(
      qf_filters_save(filters_.get(), "gone/away.npz"),
      QF_FILE,
      "qf_filters_save",
      "gone/away.npz");
  std::size_t size = 0;
  refused(
      qf_filters_shape(filters_.get(), 1, &size, &size),
      QF_INVALID_ARGUMENT,
      "qf_filters_shape",
      "layer");
  refused(
      qf_filters_text(filters_.get(), "author", nullptr, 0, &size),
      QF_INVALID_ARGUMENT,
      "qf_filters_text",
      "'author'");
}

TEST_F(CApiErrorsTest, ConfigsThatMakeNoSenseAreRefused) {
  const auto refuse = [&](auto change, const char* part) {
    qf_config config = c_config(20, 2);
    change(config);
    qf_cache* made = nullptr;
    refused(
        qf_cache_create(&config, filters_.get(), 0, &made),
        QF_INVALID_ARGUMENT,
        "qf_cache_create",
        part);
    EXPECT_EQ(made, nullptr);
  };
  refuse([](qf_config& c) { c.budget = 2; }, "below qfilters_budget");
  refuse([](qf_config& c) { c.n_sink = -1; }, "n_sink");
  refuse([](qf_config& c) { c.recent = 18; }, "recent");
  refuse([](qf_config& c) { c.interval = -1; }, "interval");
  refuse([](qf_config& c) { c.calib_tokens = 0; }, "calib_tokens");
  refuse([](qf_config& c) { c.sign = 0; }, "sign");
  refuse([](qf_config& c) { c.min_retention = 1.5; }, "min_retention");
  refuse([](qf_config& c) { c.on_low_retention = 3; }, "on_low_retention 3");
  refuse([](qf_config& c) { c.on_low_retention = -1; }, "on_low_retention -1");
  const qf_config config = c_config(20, 2);
  qf_cache* made = nullptr;
  refused(
      qf_cache_create(&config, filters_.get(), 7, &made),
      QF_INVALID_ARGUMENT,
      "qf_cache_create",
      "index=7");
}

TEST_F(CApiErrorsTest, AFailedUpdateLeavesTheLastOneToAttendOver) {
  qf_tensor keys = c_tensor(data_.keys.slice(30, 2));
  qf_tensor values = c_tensor(data_.values.slice(30, 2));
  values.tokens = 1;
  refused(
      qf_cache_update(cache_.get(), &keys, &values),
      QF_SHAPE,
      "qf_cache_update",
      "[2, 3, 2, 20]");
  values.tokens = 2;
  keys.dtype = 9;
  refused(
      qf_cache_update(cache_.get(), &keys, &values),
      QF_INVALID_ARGUMENT,
      "qf_cache_update",
      "dtype 9");
  std::size_t rows = 0;
  ASSERT_EQ(
      qf_cache_fetched_positions(cache_.get(), 0, nullptr, 0, &rows), QF_OK);
  EXPECT_EQ(rows, 30U);

  const CCache other = c_cache(c_config(20, 2), filters_.get());
  const LayerData wide(10, DType::kFloat16, 24);
  EXPECT_EQ(feed(other.get(), wide, 0, 5), QF_MISMATCH);
  EXPECT_EQ(feed(other.get(), data_, 0, 5), QF_OK) << qf_last_error();
}

TEST_F(CApiErrorsTest, WhatSettlesEndsAttention) {
  const auto queries = test::random_floats(1, 2, 3, 30, 20);
  std::vector<float> numbers(3600);
  const qf_tensor q = c_tensor(queries.view());
  const qf_output out = qf_output_dense(numbers.data(), 2, 3, 30, 20);
  const auto attend = [&](qf_attention* options = nullptr) {
    return qf_cache_attend(cache_.get(), &q, options, &out);
  };
  ASSERT_EQ(attend(), QF_OK) << qf_last_error();
  qf_attention options;
  ASSERT_EQ(qf_attention_init(&options, sizeof(options)), QF_OK);
  options.threads = 0;
  refused(attend(&options), QF_INVALID_ARGUMENT, "qf_cache_attend", "threads");
  qf_tensor narrow = q;
  narrow.dim = 19;
  refused(
      qf_cache_attend(cache_.get(), &narrow, nullptr, &out),
      QF_SHAPE,
      "qf_cache_attend",
      "[2, 3, 30, 19]");
  ASSERT_EQ(qf_cache_settle(cache_.get()), QF_OK);
  refused(attend(), QF_INVALID_ARGUMENT, "qf_cache_attend", "settled");
  ASSERT_EQ(feed(cache_.get(), data_, 30, 30), QF_OK);
  EXPECT_EQ(attend(), QF_OK);
}

TEST_F(CApiErrorsTest, GroupsThatDoNotExistAreRefused) {
  std::size_t size = 0;
  qf_cache* const c = cache_.get();
  const auto refuse = [](qf_status status, const char* function) {
    refused(status, QF_INVALID_ARGUMENT, function, "group 6 of 6");
  };
  refuse(
      qf_cache_fetched_positions(c, 6, nullptr, 0, &size),
      "qf_cache_fetched_positions");
  refuse(
      qf_cache_fetched_keys(c, 6, nullptr, 0, &size), "qf_cache_fetched_keys");
  refuse(
      qf_cache_fetched_values(c, 6, nullptr, 0, &size),
      "qf_cache_fetched_values");
  refuse(qf_cache_positions(c, 6, nullptr, 0, &size), "qf_cache_positions");
  refuse(qf_cache_scores(c, 6, nullptr, 0, &size), "qf_cache_scores");
  refuse(qf_cache_keys(c, 6, nullptr, 0, &size), "qf_cache_keys");
  refuse(qf_cache_values(c, 6, nullptr, 0, &size), "qf_cache_values");
  refuse(qf_cache_filter(c, 6, nullptr, 0, &size), "qf_cache_filter");

  const CCache fresh = c_cache(c_config(20, 2));
  for (const auto call : {qf_cache_keys, qf_cache_values}) {
    EXPECT_EQ(call(fresh.get(), 0, nullptr, 0, &size), QF_INVALID_ARGUMENT);
  }
  EXPECT_EQ(
      qf_cache_positions(fresh.get(), 0, nullptr, 0, &size),
      QF_INVALID_ARGUMENT);
  EXPECT_EQ(
      qf_cache_filter(fresh.get(), 0, nullptr, 0, &size), QF_INVALID_ARGUMENT);
  for (const auto& [layer, group] : {std::pair(1, 0), std::pair(0, 2)}) {
    EXPECT_EQ(
        qf_sequence_positions(
            sequence_.get(),
            static_cast<std::size_t>(layer),
            static_cast<std::size_t>(group),
            nullptr,
            0,
            &size),
        QF_INVALID_ARGUMENT);
  }
}

TEST_F(CApiErrorsTest, DamagedBytesAreRefusedAndChangeNothing) {
  const auto bytes = read<std::byte>(
      [&](auto... buffer) { return qf_cache_save(cache_.get(), buffer...); });
  const auto before = positions_of(cache_.get(), 0);
  for (std::size_t size = 0; size < bytes.size(); size += 1 + size / 20) {
    const qf_status status = qf_cache_restore(cache_.get(), bytes.data(), size);
    EXPECT_TRUE(status == QF_FILE || status == QF_MISMATCH) << status;
  }
  auto longer = bytes;
  longer.push_back(std::byte{0});
  refused(
      qf_cache_restore(cache_.get(), longer.data(), longer.size()),
      QF_FILE,
      "qf_cache_restore",
      "");
  EXPECT_EQ(qf_cache_restore(cache_.get(), nullptr, 0), QF_FILE);
  EXPECT_EQ(positions_of(cache_.get(), 0), before);
  const CCache other = c_cache(c_config(21, 2), filters_.get());
  refused(
      qf_cache_restore(other.get(), bytes.data(), bytes.size()),
      QF_MISMATCH,
      "qf_cache_restore",
      "qfilters_budget 21");

  const auto sequence = read<std::byte>([&](auto... buffer) {
    return qf_sequence_save(sequence_.get(), buffer...);
  });
  for (std::size_t size = 0; size < sequence.size(); ++size) {
    const qf_status status =
        qf_sequence_restore(sequence_.get(), sequence.data(), size);
    EXPECT_TRUE(status == QF_FILE || status == QF_MISMATCH) << status;
  }
}

TEST_F(CApiErrorsTest, RetentionWarnsOrRaisesOnce) {
  qf_config config = c_config(20, 2);
  config.on_low_retention = QF_ON_LOW_RETENTION_WARN;
  const CCache warning = c_cache(config, filters_.get());
  std::vector<std::string> heard;
  const auto handler = [](void* user, const char* message) {
    static_cast<std::vector<std::string>*>(user)->emplace_back(message);
  };
  ASSERT_EQ(qf_cache_on_warning(warning.get(), handler, &heard), QF_OK);
  EXPECT_EQ(feed(warning.get(), data_, 0, 40), QF_OK);
  EXPECT_EQ(feed(warning.get(), data_, 40, 1), QF_OK);
  ASSERT_EQ(heard.size(), 1U);
  EXPECT_THAT(heard[0], HasSubstr("20 of 40 tokens retained"));
  const CCache quiet = c_cache(config, filters_.get());
  ASSERT_EQ(qf_cache_on_warning(quiet.get(), handler, &heard), QF_OK);
  ASSERT_EQ(qf_cache_on_warning(quiet.get(), nullptr, nullptr), QF_OK);
  EXPECT_EQ(feed(quiet.get(), data_, 0, 40), QF_OK);
  EXPECT_EQ(heard.size(), 1U);

  config.min_retention = 0;  // no floor
  config.on_low_retention = QF_ON_LOW_RETENTION_RAISE;
  EXPECT_EQ(feed(c_cache(config, filters_.get()).get(), data_, 0, 40), QF_OK);
  config.min_retention = 0.9;
  const CCache raising = c_cache(config, filters_.get());
  refused(
      feed(raising.get(), data_, 0, 40),
      QF_LOW_RETENTION,
      "qf_cache_update",
      "20 of 40");
  std::size_t size = 0;
  EXPECT_EQ(
      qf_cache_fetched_keys(raising.get(), 0, nullptr, 0, &size),
      QF_INVALID_ARGUMENT);
  qf_cache_stats stats;
  ASSERT_EQ(qf_cache_get_stats(raising.get(), &stats, sizeof(stats)), QF_OK);
  EXPECT_EQ(stats.offset, 40U);
  EXPECT_EQ(stats.tokens_kept, 20U);
  EXPECT_EQ(stats.kv_heads, 3U);
  EXPECT_EQ(feed(raising.get(), data_, 40, 1), QF_OK);
}

TEST_F(CApiErrorsTest, SequencesRefuseBadOptionsAndOrder) {
  const qf_layer layer{2, 4, 4, 0};
  const auto create = [&](const char* policy,
                          const qf_sequence_config& config,
                          std::size_t count = 1) {
    qf_sequence* made = nullptr;
    const qf_status status = qf_sequence_create(
        &layer, count, policy, &config, filters_.get(), &made);
    EXPECT_EQ(made, nullptr);
    return status;
  };
  qf_sequence_config config = sequence_config();
  const auto refuse = [](qf_status status, qf_status want, const char* part) {
    refused(status, want, "qf_sequence_create", part);
  };
  refuse(create("best", config), QF_INVALID_ARGUMENT, "'best'");
  refuse(create("full", config, 0), QF_INVALID_ARGUMENT, "layers=0");
  refuse(create("qfilters", config), QF_MISMATCH, "");
  config.threads = 0;
  refuse(create("full", config), QF_INVALID_ARGUMENT, "threads=0");
  config = sequence_config();
  config.dtype = QF_FLOAT32;
  refuse(create("full", config), QF_INVALID_ARGUMENT, "");
  config.dtype = -1;
  refuse(create("full", config), QF_INVALID_ARGUMENT, "dtype -1");
  config = sequence_config();
  config.rule = 3;
  refuse(create("full", config), QF_INVALID_ARGUMENT, "rule=3");
  config = sequence_config();
  config.block = 0;
  refuse(create("knorm", config), QF_INVALID_ARGUMENT, "block=0");
  config = sequence_config();
  config.floor = -1;
  refuse(create("knorm", config), QF_INVALID_ARGUMENT, "floor=-1");
  config = sequence_config();
  config.row_order = 2;
  refuse(create("full", config), QF_INVALID_ARGUMENT, "row_order=2");
  config = sequence_config();
  config.row_format = 2;
  refuse(create("full", config), QF_INVALID_ARGUMENT, "row_format=2");

  std::array<std::uint16_t, 8> halves{};
  const qf_tensor keys = qf_tensor_dense(halves.data(), QF_FLOAT16, 1, 2, 1, 4);
  qf_sequence* const s = sequence_.get();
  const auto refuse_order = [](qf_status status, const char* function) {
    refused(status, QF_INVALID_ARGUMENT, function, "micro-batch is open");
  };
  refuse_order(qf_sequence_commit(s), "qf_sequence_commit");
  refuse_order(qf_sequence_append(s, 0, &keys, &keys), "qf_sequence_append");
  EXPECT_EQ(qf_sequence_rollback(s), QF_OK);
  ASSERT_EQ(qf_sequence_begin(s, 1), QF_OK);
  refuse_order(qf_sequence_begin(s, 1), "qf_sequence_begin");
  std::size_t size = 0;
  refuse_order(qf_sequence_save(s, nullptr, 0, &size), "qf_sequence_save");
  qf_tensor wide = keys;
  wide.dim = 5;
  refused(
      qf_sequence_append(s, 0, &wide, &keys),
      QF_SHAPE,
      "qf_sequence_append",
      "[1, 2, 1, 5]");
}

TEST_F(CApiErrorsTest, MemoryThatIsRefusedOrMissingIsACode) {
  qf_sequence_config config = sequence_config();
  config.byte_limit = 100;
  const CSequence small = streaming_sequence(config);
  std::array<std::uint16_t, 8> halves{};
  const qf_tensor keys = qf_tensor_dense(halves.data(), QF_FLOAT16, 1, 2, 1, 4);
  ASSERT_EQ(qf_sequence_begin(small.get(), 1), QF_OK);
  ASSERT_EQ(qf_sequence_append(small.get(), 0, &keys, &keys), QF_OK);
  refused(
      qf_sequence_commit(small.get()),
      QF_MEMORY_LIMIT,
      "qf_sequence_commit",
      "100");
  EXPECT_EQ(qf_sequence_rollback(small.get()), QF_OK);

  // Two masks of its square are more than any memory holds.
  constexpr std::size_t kTokens = INT32_MAX - 30;
  qf_mask mask;
  std::size_t size = 0;
  refused(
      qf_cache_make_mask(cache_.get(), kTokens, 1, 0, &mask, nullptr, 0, &size),
      QF_OUT_OF_MEMORY,
      "qf_cache_make_mask",
      "memory");
}

TEST_F(CApiErrorsTest, NothingAtAllIsAnUpdate) {
  const CCache cache = c_cache(c_config(20, 2), filters_.get());
  const qf_tensor none = qf_tensor_dense(nullptr, QF_FLOAT16, 2, 3, 0, 20);
  ASSERT_EQ(qf_cache_update(cache.get(), &none, &none), QF_OK)
      << qf_last_error();
  const qf_tensor queries = qf_tensor_dense(nullptr, QF_FLOAT32, 2, 3, 0, 20);
  const qf_output out = qf_output_dense(nullptr, 2, 3, 0, 20);
  EXPECT_EQ(qf_cache_attend(cache.get(), &queries, nullptr, &out), QF_OK)
      << qf_last_error();
  EXPECT_TRUE(positions_of(cache.get(), 0).empty());
}

TEST_F(CApiErrorsTest, EachThreadHasItsOwnLastError) {
  EXPECT_EQ(qf_set_isa("here"), QF_INVALID_ARGUMENT);
  std::string before = "unread";
  std::string after;
  std::thread([&] {
    before = qf_last_error();
    EXPECT_EQ(qf_set_isa("there"), QF_INVALID_ARGUMENT);
    after = qf_last_error();
  }).join();
  EXPECT_EQ(before, "");
  EXPECT_THAT(after, HasSubstr("'there'"));
  EXPECT_THAT(qf_last_error(), HasSubstr("'here'"));
  EXPECT_EQ(qf_cache_settle(cache_.get()), QF_OK);  // keeps the last reason
  EXPECT_THAT(qf_last_error(), HasSubstr("'here'"));
}

TEST_F(CApiErrorsTest, ALongReasonIsCutNotDropped) {
  const std::string name(5000, 'x');
  EXPECT_EQ(qf_set_isa(name.c_str()), QF_INVALID_ARGUMENT);
  EXPECT_THAT(qf_last_error(), StartsWith("qf_set_isa: isa: 'xxx"));
}

}  // namespace
}  // namespace qfilters
