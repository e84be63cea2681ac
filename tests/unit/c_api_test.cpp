// The C API does what the C++ classes do, bit for bit.
#include "qfilters/c_api.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/attention.h"
#include "qfilters/filter_file.h"
#include "qfilters/isa.h"
#include "qfilters/version.h"

#include "unit/c_api_fixture.h"

namespace qfilters {
namespace {

using test::bits_of;
using test::c_cache;
using test::c_config;
using test::c_filters;
using test::c_tensor;
using test::CCache;
using test::CFilters;
using test::config_of;
using test::LayerData;
using test::read;
using test::read_text;

// Attention of the last update's tokens, the same through both APIs.
void expect_same_attention(
    qf_cache* cache, const RowsView& rows, std::size_t tokens) {
  const RowShape& shape = rows.shape();
  const std::size_t heads = 2 * shape.kv_heads;
  const auto queries =
      test::random_floats(5, shape.batch, heads, tokens, shape.key_dim);
  const std::size_t size = shape.batch * heads * tokens * shape.value_dim;
  std::vector<float> want(size);
  std::vector<float> got(size);
  attend(
      queries.view(),
      rows,
      {.scale = 0.3F, .soft_cap = 5, .window = 40, .threads = 2},
      OutputView::dense(
          want.data(), shape.batch, heads, tokens, shape.value_dim));
  qf_attention options;
  ASSERT_EQ(qf_attention_init(&options, sizeof(options)), QF_OK);
  options.scale = 0.3F;
  options.soft_cap = 5;
  options.window = 40;
  options.threads = 2;
  const qf_tensor q = c_tensor(queries.view());
  const qf_output out =
      qf_output_dense(got.data(), shape.batch, heads, tokens, shape.value_dim);
  ASSERT_EQ(qf_cache_attend(cache, &q, &options, &out), QF_OK)
      << qf_last_error();
  EXPECT_EQ(bits_of(got), bits_of(want));
  // Without options, the defaults.
  attend(
      queries.view(),
      rows,
      {},
      OutputView::dense(
          want.data(), shape.batch, heads, tokens, shape.value_dim));
  ASSERT_EQ(qf_cache_attend(cache, &q, nullptr, &out), QF_OK);
  EXPECT_EQ(bits_of(got), bits_of(want));
}

void expect_same_fetched_rows(qf_cache* cache, const RowsView& rows) {
  for (std::size_t g = 0; g < rows.shape().groups(); ++g) {
    std::vector<std::int32_t> positions(rows.rows(g));
    std::vector<std::uint16_t> keys(rows.rows(g) * rows.shape().key_dim);
    std::vector<std::uint16_t> values(rows.rows(g) * rows.shape().value_dim);
    for (std::size_t r = 0; r < positions.size(); ++r) {
      positions[r] = rows.position(g, r);
      rows.read_key(g, r, keys.data() + r * rows.shape().key_dim);
      rows.read_value(g, r, values.data() + r * rows.shape().value_dim);
    }
    EXPECT_EQ(
        read<std::int32_t>([&](auto... buffer) {
          return qf_cache_fetched_positions(cache, g, buffer...);
        }),
        positions);
    EXPECT_EQ(
        read<std::uint16_t>([&](auto... buffer) {
          return qf_cache_fetched_keys(cache, g, buffer...);
        }),
        keys);
    EXPECT_EQ(
        read<std::uint16_t>([&](auto... buffer) {
          return qf_cache_fetched_values(cache, g, buffer...);
        }),
        values);
  }
}

void expect_same_stats(qf_cache* cache, QFiltersKVCache& want) {
  qf_cache_stats stats;
  ASSERT_EQ(qf_cache_get_stats(cache, &stats, sizeof(stats)), QF_OK);
  EXPECT_EQ(stats.offset, want.offset());
  EXPECT_EQ(stats.tokens_kept, want.tokens_kept());
  EXPECT_EQ(stats.tokens_seen, want.tokens_seen());
  EXPECT_EQ(stats.kept_bytes, want.qfilters_kept_bytes());
  EXPECT_EQ(stats.full_bytes, want.full_seq_bytes());
  EXPECT_EQ(stats.row_bytes, want.nbytes());
  EXPECT_EQ(stats.non_finite_scores, want.non_finite_scores());
  EXPECT_EQ(stats.compression_ratio, want.compression_ratio());
}

void expect_same_stored_rows(qf_cache* cache, QFiltersKVCache& want) {
  const auto states = want.states();
  for (std::size_t g = 0; g < states.size(); ++g) {
    EXPECT_EQ(test::positions_of(cache, g), states[g].positions);
    EXPECT_EQ(
        read<float>([&](auto... buffer) {
          return qf_cache_scores(cache, g, buffer...);
        }),
        states[g].scores);
    EXPECT_EQ(
        read<std::uint16_t>(
            [&](auto... buffer) { return qf_cache_keys(cache, g, buffer...); }),
        states[g].keys);
    EXPECT_EQ(
        read<std::uint16_t>([&](auto... buffer) {
          return qf_cache_values(cache, g, buffer...);
        }),
        states[g].values);
    EXPECT_EQ(
        read<float>([&](auto... buffer) {
          return qf_cache_filter(cache, g, buffer...);
        }),
        states[g].filter_dir);
  }
}

void expect_same_mask(
    qf_cache* cache,
    QFiltersKVCache& other,
    std::size_t tokens,
    bool array,
    std::size_t window) {
  const AttentionMask want = other.make_mask(tokens, array, window);
  qf_mask mask{};
  const auto allowed = read<std::uint8_t>([&](auto... buffer) {
    return qf_cache_make_mask(cache, tokens, array, window, &mask, buffer...);
  });
  EXPECT_EQ(mask.kind, static_cast<std::int32_t>(want.kind));
  EXPECT_EQ(mask.batch, want.batch);
  EXPECT_EQ(mask.queries, want.queries);
  EXPECT_EQ(mask.keys, want.keys);
  EXPECT_EQ(allowed, want.allowed);
}

std::vector<std::byte> saved(qf_cache* cache) {
  return read<std::byte>(
      [&](auto... buffer) { return qf_cache_save(cache, buffer...); });
}

void expect_same_life(
    const LayerData& data, qf_cache* cache, QFiltersKVCache& want) {
  expect_same_stats(cache, want);
  expect_same_mask(cache, want, 5, false, 0);
  std::size_t first = 0;
  for (const std::size_t count : {1U, 40U, 17U, 1U, 1U, 30U}) {
    const RowsView rows = data.feed(want, count);
    ASSERT_EQ(test::feed(cache, data, first, count), QF_OK) << qf_last_error();
    first += count;
    expect_same_fetched_rows(cache, rows);
    expect_same_attention(cache, rows, count);
    expect_same_stats(cache, want);
  }
  qf_cache_stats stats;
  ASSERT_EQ(qf_cache_get_stats(cache, &stats, sizeof(stats)), QF_OK);
  EXPECT_EQ(stats.batch, data.batch);
  EXPECT_EQ(stats.kv_heads, data.heads);
  EXPECT_EQ(stats.key_dim, data.dim);
  EXPECT_EQ(stats.value_dim, data.value_dim);
  EXPECT_EQ(stats.dtype, c_tensor(data.keys.view()).dtype);
  expect_same_stored_rows(cache, want);
  for (const bool array : {false, true}) {
    expect_same_mask(cache, want, 1, array, 0);
    expect_same_mask(cache, want, 6, array, 0);
    expect_same_mask(cache, want, 3, array, 10);
  }
  EXPECT_EQ(saved(cache), want.save().encode());
}

TEST(CApiCacheTest, LivesLikeTheCppClassWithFilters) {
  const LayerData data(120, DType::kFloat16, 20, 12);
  const CFilters filters = c_filters(data.filters);
  QFiltersKVCache want(config_of(20, 2, 3, 4), data.filters);
  expect_same_life(
      data, c_cache(c_config(20, 2, 3, 4), filters.get()).get(), want);
}

TEST(CApiCacheTest, LivesLikeTheCppClassWithTheFallback) {
  const LayerData data(120, DType::kBFloat16);
  Config config = config_of(24, 1);
  config.qfilters_calib_tokens = 50;
  config.qfilters_sign = -1;
  qf_config c = c_config(24, 1);
  c.calib_tokens = 50;
  c.sign = -1;
  QFiltersKVCache want(config);
  expect_same_life(data, c_cache(c).get(), want);
}

TEST(CApiCacheTest, TakesFloat32AndOutlivesItsFilters) {
  const auto rows = test::random_floats(1, 1, 2, 40, 8);
  const LayerFilters filters{2, 8, test::random_filter(2, 16)};
  QFiltersKVCache want(config_of(9, 1), filters);
  want.update_and_fetch(rows.view(), rows.view());
  const CCache cache = c_cache(c_config(9, 1), c_filters(filters).get());
  const qf_tensor view = c_tensor(rows.view());
  ASSERT_EQ(qf_cache_update(cache.get(), &view, &view), QF_OK);
  expect_same_stored_rows(cache.get(), want);
}

TEST(CApiCacheTest, BorrowsRowsOnDemand) {
  LayerData data(40);
  QFiltersKVCache want(config_of(9, 1), data.filters);
  data.feed(want, 40);
  const CCache cache = c_cache(c_config(9, 1), c_filters(data.filters).get());
  const qf_tensor keys = c_tensor(data.keys.view());
  const qf_tensor values = c_tensor(data.values.view());
  ASSERT_EQ(qf_cache_update_borrowed(cache.get(), &keys, &values), QF_OK);
  const std::uint16_t key = data.keys.row(0, 0, 3)[5];
  data.keys.row(0, 0, 3)[5] = 0x3C00;  // against the rule, to see it
  EXPECT_EQ(
      read<std::uint16_t>([&](auto... buffer) {
        return qf_cache_fetched_keys(cache.get(), 0, buffer...);
      })[3 * 20 + 5],
      0x3C00);
  data.keys.row(0, 0, 3)[5] = key;
  expect_same_stored_rows(cache.get(), want);
}

TEST(CApiCacheTest, DefaultsAreThoseOfTheCppClass) {
  qf_config config;
  ASSERT_EQ(qf_config_init(&config, sizeof(config)), QF_OK);
  EXPECT_EQ(config.struct_size, sizeof(config));
  const LayerData data;
  const CFilters filters = c_filters(data.filters);
  QFiltersKVCache want(Config{}, data.filters);
  data.feed(want, 100);
  for (const qf_config* given :
       {static_cast<const qf_config*>(nullptr),
        static_cast<const qf_config*>(&config)}) {
    qf_cache* made = nullptr;
    ASSERT_EQ(qf_cache_create(given, filters.get(), 0, &made), QF_OK);
    const CCache cache(made);
    ASSERT_EQ(test::feed(made, data, 0, 100), QF_OK);
    EXPECT_EQ(saved(made), want.save().encode());  // the config is part of it
  }
}

TEST(CApiCacheTest, ContinuesWhatCppSaved) {
  const LayerData data;
  const CFilters filters = c_filters(data.filters);
  QFiltersKVCache want(config_of(20, 2), data.filters);
  data.feed(want, 50);
  const auto bytes = want.save().encode();
  const CCache cache = c_cache(c_config(20, 2), filters.get());
  ASSERT_EQ(qf_cache_restore(cache.get(), bytes.data(), bytes.size()), QF_OK);
  expect_same_stats(cache.get(), want);
  const RowsView rows = data.feed(want, 9);
  ASSERT_EQ(test::feed(cache.get(), data, 50, 9), QF_OK);
  expect_same_attention(cache.get(), rows, 9);
  expect_same_stored_rows(cache.get(), want);
}

TEST(CApiFiltersTest, HoldsWhatItIsGiven) {
  const auto values = test::random_filter(1, 24);
  qf_filters* made = nullptr;
  ASSERT_EQ(
      qf_filters_create(values.data(), 2, 3, 4, "toy", "abc", &made), QF_OK);
  const CFilters filters(made);
  std::size_t layers = 0;
  std::size_t heads = 0;
  std::size_t dim = 0;
  ASSERT_EQ(qf_filters_layers(made, &layers), QF_OK);
  ASSERT_EQ(qf_filters_shape(made, 1, &heads, &dim), QF_OK);
  EXPECT_EQ(layers, 2U);
  EXPECT_EQ(heads, 3U);
  EXPECT_EQ(dim, 4U);
  const auto second = read<float>(
      [&](auto... buffer) { return qf_filters_values(made, 1, buffer...); });
  EXPECT_THAT(second, ::testing::ElementsAreArray(values.data() + 12, 12));
  const auto text = [&](const char* name) {
    return read_text(
        [&](auto... buffer) { return qf_filters_text(made, name, buffer...); });
  };
  EXPECT_EQ(text("model_id"), "toy");
  EXPECT_EQ(text("model_fingerprint"), "abc");
  EXPECT_EQ(text("dataset"), "");
  const FilterBank bank(
      {{3, 4, {values.begin(), values.begin() + 12}},
       {3, 4, {values.begin() + 12, values.end()}}},
      {});
  EXPECT_EQ(text("fingerprint"), bank.fingerprint());
}

TEST(CApiFiltersTest, ReadsWhatCppWroteAndBack) {
  const auto folder = std::filesystem::temp_directory_path();
  const std::string path = (folder / "qfilters_c_api_test.npz").string();
  const std::string copy = (folder / "qfilters_c_api_copy.npz").string();
  FilterMetadata metadata;
  metadata.model_id = "toy";
  metadata.query_site = "attention";
  metadata.dataset = "book";
  metadata.text_hash = "0123";
  const FilterBank bank(
      {{2, 3, test::random_filter(1, 6)}, {1, 5, test::random_filter(2, 5)}},
      metadata);
  save_filters(bank, path);
  qf_filters* made = nullptr;
  ASSERT_EQ(qf_filters_load(path.c_str(), "toy", nullptr, &made), QF_OK)
      << qf_last_error();
  const CFilters filters(made);
  for (const auto& [name, want] :
       {std::pair("query_site", "attention"),
        std::pair("dataset", "book"),
        std::pair("text_hash", "0123")}) {
    EXPECT_EQ(
        read_text([&, key = name](auto... buffer) {
          return qf_filters_text(made, key, buffer...);
        }),
        want);
  }
  ASSERT_EQ(qf_filters_save(made, copy.c_str()), QF_OK) << qf_last_error();
  EXPECT_EQ(load_filters(copy), bank);
  std::filesystem::remove(path);
  std::filesystem::remove(copy);
}

TEST(CApiTest, NamesVersionAndInstructionSets) {
  EXPECT_STREQ(qf_version(), kVersion);
  std::string list;
  for (const std::string& name : runnable_isas()) {
    list += (list.empty() ? "" : ",") + name;
  }
  EXPECT_EQ(read_text(qf_runnable_isas), list);
  ASSERT_EQ(qf_set_isa("scalar"), QF_OK);
  EXPECT_EQ(read_text(qf_active_isa), "scalar");
  ASSERT_EQ(qf_set_isa("auto"), QF_OK);
  EXPECT_EQ(read_text(qf_active_isa), runnable_isas().front());
}

TEST(CApiTest, TensorsAreViewsOfDenseArrays) {
  const float data[1] = {};
  const TensorView want = TensorView::dense(data, DType::kBFloat16, 2, 3, 4, 5);
  const qf_tensor got = qf_tensor_dense(data, QF_BFLOAT16, 2, 3, 4, 5);
  const qf_tensor converted = c_tensor(want);
  EXPECT_EQ(got.data, converted.data);
  EXPECT_EQ(got.dtype, converted.dtype);
  EXPECT_EQ(got.batch, 2U);
  EXPECT_EQ(got.heads, 3U);
  EXPECT_EQ(got.tokens, 4U);
  EXPECT_EQ(got.dim, 5U);
  EXPECT_EQ(got.batch_stride, want.batch_stride);
  EXPECT_EQ(got.head_stride, want.head_stride);
  EXPECT_EQ(got.token_stride, want.token_stride);
}

}  // namespace
}  // namespace qfilters
