// qf_sequence does what a SequenceCache does, bit for bit.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/attention.h"
#include "qfilters/c_api.h"
#include "qfilters/policy.h"
#include "qfilters/sequence_cache.h"

#include "unit/c_api_fixture.h"
#include "unit/sequence_fixture.h"

namespace qfilters {
namespace {

using test::bits_of;
using test::c_tensor;
using test::CFilters;
using test::CSequence;
using test::Model;
using test::read;

// Two global layers and one with a window.
const Model& model() {
  static const Model made({{2, 24, 24, 0}, {3, 17, 8, 0}, {2, 16, 16, 70}}, 2);
  return made;
}

CSequence c_sequence(
    const std::string& policy,
    const qf_filters* filters,
    RowOrder order,
    RowFormat format) {
  std::vector<qf_layer> layers;
  for (const LayerShape& l : model().layers) {
    layers.push_back({l.kv_heads, l.key_dim, l.value_dim, l.window});
  }
  qf_sequence_config config;
  EXPECT_EQ(qf_sequence_config_init(&config, sizeof(config)), QF_OK);
  config.batch = 2;
  config.budget = 40;
  config.sinks = 3;
  config.recent = 5;
  config.interval = order == RowOrder::kSlot ? 0 : 6;
  config.row_order = order == RowOrder::kSlot ? QF_ROWS_SLOT : QF_ROWS_TEMPORAL;
  EXPECT_EQ(config.row_format, QF_ROW_FORMAT_SAME);
  if (format == RowFormat::kInt8) config.row_format = QF_ROW_FORMAT_INT8;
  if (order == RowOrder::kTemporal) {
    config.rule = QF_RULE_SHARED;
    config.floor = 0.3;
    config.block = 3;
  }
  config.seed = 7;
  config.threads = 2;
  qf_sequence* out = nullptr;
  EXPECT_EQ(
      qf_sequence_create(
          layers.data(), layers.size(), policy.c_str(), &config, filters, &out),
      QF_OK)
      << qf_last_error();
  return CSequence(out);
}

void append(qf_sequence* sequence, std::size_t first, std::size_t count) {
  ASSERT_EQ(qf_sequence_begin(sequence, count), QF_OK) << qf_last_error();
  for (std::size_t l = 0; l < model().layers.size(); ++l) {
    const qf_tensor keys = c_tensor(model().keys[l].slice(first, count));
    const qf_tensor values = c_tensor(model().values[l].slice(first, count));
    ASSERT_EQ(qf_sequence_append(sequence, l, &keys, &values), QF_OK);
  }
}

std::vector<std::byte> saved(const qf_sequence* sequence) {
  return read<std::byte>(
      [&](auto... buffer) { return qf_sequence_save(sequence, buffer...); });
}

void expect_same_rows(const qf_sequence* sequence, const SequenceCache& want) {
  for (std::size_t l = 0; l < want.layers(); ++l) {
    const KVStore& store = want.store(l);
    for (std::size_t g = 0; g < store.shape().groups(); ++g) {
      EXPECT_THAT(
          read<std::int32_t>([&](auto... buffer) {
            return qf_sequence_positions(sequence, l, g, buffer...);
          }),
          ::testing::ElementsAreArray(store.positions(g)));
      EXPECT_EQ(
          bits_of(read<float>([&](auto... buffer) {
            return qf_sequence_scores(sequence, l, g, buffer...);
          })),
          bits_of(store.scores(g)));
      std::vector<std::uint16_t> keys(store.rows(g) * store.shape().key_dim);
      std::vector<std::uint16_t> values(
          store.rows(g) * store.shape().value_dim);
      for (std::size_t r = 0; r < store.rows(g); ++r) {
        store.read_key(g, r, keys.data() + r * store.shape().key_dim);
        store.read_value(g, r, values.data() + r * store.shape().value_dim);
      }
      EXPECT_EQ(
          read<std::uint16_t>([&](auto... buffer) {
            return qf_sequence_keys(sequence, l, g, buffer...);
          }),
          keys);
      EXPECT_EQ(
          read<std::uint16_t>([&](auto... buffer) {
            return qf_sequence_values(sequence, l, g, buffer...);
          }),
          values);
    }
  }
}

void expect_same_stats(
    const qf_sequence* sequence, const SequenceCache& cache) {
  const SequenceStats want = cache.stats();
  qf_sequence_stats stats;
  ASSERT_EQ(qf_sequence_get_stats(sequence, &stats, sizeof(stats)), QF_OK);
  EXPECT_EQ(stats.tokens, want.tokens);
  EXPECT_EQ(stats.rows_min, want.rows_min);
  EXPECT_EQ(stats.rows_max, want.rows_max);
  EXPECT_EQ(stats.rows_mean, want.rows_mean);
  EXPECT_EQ(stats.kv_bytes, want.kv_bytes);
  EXPECT_EQ(stats.kv_bytes_peak, want.kv_bytes_peak);
  EXPECT_EQ(stats.kv_bytes_full, want.kv_bytes_full);
  EXPECT_EQ(stats.evictions, want.evictions);
  EXPECT_EQ(stats.rows_evicted, want.rows_evicted);
  EXPECT_EQ(stats.non_finite_scores, want.non_finite_scores);
}

void expect_same_attention(
    const qf_sequence* sequence,
    const SequenceCache& want,
    std::size_t layer,
    std::size_t tokens) {
  const LayerShape& shape = model().layers[layer];
  const auto queries =
      test::random_floats(4, 2, shape.kv_heads, tokens, shape.key_dim);
  std::vector<float> a(2 * shape.kv_heads * tokens * shape.value_dim);
  std::vector<float> b(a.size());
  attend(
      queries.view(),
      want.rows(layer),
      {},
      OutputView::dense(a.data(), 2, shape.kv_heads, tokens, shape.value_dim));
  const qf_tensor q = c_tensor(queries.view());
  const qf_output out =
      qf_output_dense(b.data(), 2, shape.kv_heads, tokens, shape.value_dim);
  ASSERT_EQ(qf_sequence_attend(sequence, layer, &q, nullptr, &out), QF_OK)
      << qf_last_error();
  EXPECT_EQ(bits_of(a), bits_of(b));
}

CFilters c_filters(const FilterBank& bank) {
  std::vector<qf_filter_layer> layers;
  for (std::size_t l = 0; l < bank.layers(); ++l) {
    const LayerFilters& filters = bank.layer(l);
    layers.push_back({filters.heads, filters.dim, filters.values.data()});
  }
  qf_filters* out = nullptr;
  EXPECT_EQ(
      qf_filters_create_layers(
          layers.data(), layers.size(), nullptr, nullptr, &out),
      QF_OK);
  return CFilters(out);
}

void live_like_the_cpp_class(RowFormat format) {
  const auto names = Policy::names();
  for (std::size_t i = 0; i < 2 * names.size(); ++i) {
    const std::string_view name = names[i / 2];
    SequenceOptions options = model().options();
    options.format = format;
    options.order = i % 2 == 0 ? RowOrder::kTemporal : RowOrder::kSlot;
    SCOPED_TRACE(std::string(name) + (i % 2 == 0 ? " temporal" : " slot"));
    PolicyOptions limits = test::budget(40, 3, 5, i % 2 == 0 ? 6 : 0);
    limits.seed = 7;
    if (options.order == RowOrder::kTemporal) {
      limits.rule = BudgetRule::kShared;
      limits.floor = 0.3;
      limits.block = 3;
    }
    SequenceCache want(
        model().layers,
        Policy::make(name, limits, model().filters_for(name)),
        options);
    const CFilters filters = c_filters(*model().filters_for(name));
    const CSequence sequence =
        c_sequence(std::string(name), filters.get(), options.order, format);
    for (const std::size_t count : {50U, 64U, 1U, 1U, 30U}) {
      append(sequence.get(), want.offset(), count);
      model().append(want, count);
      for (std::size_t l = 0; l < model().layers.size(); ++l) {
        expect_same_attention(sequence.get(), want, l, count);
      }
      ASSERT_EQ(qf_sequence_commit(sequence.get()), QF_OK);
      want.commit();
    }
    append(sequence.get(), want.offset(), 5);
    ASSERT_EQ(qf_sequence_rollback(sequence.get()), QF_OK);
    expect_same_rows(sequence.get(), want);
    expect_same_stats(sequence.get(), want);

    const auto bytes = saved(sequence.get());
    EXPECT_EQ(bytes, want.save().encode());
    ASSERT_EQ(qf_sequence_clear(sequence.get()), QF_OK);
    EXPECT_NE(saved(sequence.get()), bytes);
    ASSERT_EQ(
        qf_sequence_restore(sequence.get(), bytes.data(), bytes.size()), QF_OK);
    expect_same_rows(sequence.get(), want);
  }
}

TEST(CApiSequenceTest, LivesLikeTheCppClassUnderEveryPolicy) {
  live_like_the_cpp_class(RowFormat::kSame);
}

TEST(CApiSequenceTest, LivesLikeTheCppClassWithInt8Rows) {
  live_like_the_cpp_class(RowFormat::kInt8);
}

}  // namespace
}  // namespace qfilters
