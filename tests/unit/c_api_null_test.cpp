// NULL is refused by every function of the C API, with the argument's name.
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/c_api.h"

#include "unit/c_api_fixture.h"

namespace qfilters {
namespace {

using test::c_tensor;

using CApiNullTest = test::CApiTest;

// One call with a NULL that it refuses by name.
#define NULLS(function, part, ...) \
  refused(function(__VA_ARGS__), QF_INVALID_ARGUMENT, #function, part)

TEST_F(CApiNullTest, NullForFiltersIsRefused) {
  qf_filters* made = nullptr;
  const float one = 1;
  const qf_filter_layer layer{1, 1, nullptr};
  std::size_t size = 0;
  char text[8];
  const auto* f = filters_.get();
  NULLS(qf_filters_create, "out", &one, 1, 1, 1, nullptr, nullptr, nullptr);
  NULLS(qf_filters_create, "values", nullptr, 1, 1, 1, nullptr, nullptr, &made);
  NULLS(qf_filters_create_layers, "out", &layer, 1, nullptr, nullptr, nullptr);
  NULLS(
      qf_filters_create_layers, "layers", nullptr, 1, nullptr, nullptr, &made);
  NULLS(qf_filters_create_layers, "values", &layer, 1, nullptr, nullptr, &made);
  NULLS(qf_filters_load, "path", nullptr, nullptr, nullptr, &made);
  NULLS(qf_filters_load, "out", "a.npz", nullptr, nullptr, nullptr);
  NULLS(qf_filters_save, "filters", nullptr, "a.npz");
  NULLS(qf_filters_save, "path", f, nullptr);
  NULLS(qf_filters_layers, "filters", nullptr, &size);
  NULLS(qf_filters_layers, "layers", f, nullptr);
  NULLS(qf_filters_shape, "filters", nullptr, 0, &size, &size);
  NULLS(qf_filters_shape, "heads", f, 0, nullptr, &size);
  NULLS(qf_filters_shape, "dim", f, 0, &size, nullptr);
  NULLS(qf_filters_values, "filters", nullptr, 0, nullptr, 0, &size);
  NULLS(qf_filters_values, "size", f, 0, nullptr, 0, nullptr);
  NULLS(qf_filters_values, "out", f, 0, nullptr, 1000, &size);
  NULLS(qf_filters_text, "filters", nullptr, "dataset", text, 8, &size);
  NULLS(qf_filters_text, "name", f, nullptr, text, 8, &size);
  NULLS(qf_filters_text, "size", f, "dataset", text, 8, nullptr);
  EXPECT_EQ(made, nullptr);
}

TEST_F(CApiNullTest, NullForACacheIsRefused) {
  qf_cache* made = nullptr;
  qf_cache* const c = cache_.get();
  const qf_tensor keys = c_tensor(data_.keys.slice(30, 1));
  qf_tensor empty = keys;
  empty.data = nullptr;
  std::vector<float> numbers(3600);
  const qf_tensor queries =
      qf_tensor_dense(numbers.data(), QF_FLOAT32, 2, 3, 30, 20);
  const qf_output out = qf_output_dense(numbers.data(), 2, 3, 30, 20);
  qf_output nowhere = out;
  nowhere.data = nullptr;
  std::size_t size = 0;
  qf_cache_stats stats;
  qf_mask mask;
  NULLS(qf_cache_create, "out", nullptr, filters_.get(), 0, nullptr);
  NULLS(qf_cache_update, "cache", nullptr, &keys, &keys);
  NULLS(qf_cache_update, "keys is", c, nullptr, &keys);
  NULLS(qf_cache_update, "values is", c, &keys, nullptr);
  NULLS(qf_cache_update, "keys->data", c, &empty, &keys);
  NULLS(qf_cache_update, "values->data", c, &keys, &empty);
  NULLS(qf_cache_update_borrowed, "cache", nullptr, &keys, &keys);
  NULLS(qf_cache_update_borrowed, "keys is", c, nullptr, &keys);
  NULLS(qf_cache_update_borrowed, "values is", c, &keys, nullptr);
  NULLS(qf_cache_attend, "cache", nullptr, &queries, nullptr, &out);
  NULLS(qf_cache_attend, "queries", c, nullptr, nullptr, &out);
  NULLS(qf_cache_attend, "out is", c, &queries, nullptr, nullptr);
  NULLS(qf_cache_attend, "out->data", c, &queries, nullptr, &nowhere);
  NULLS(qf_cache_fetched_positions, "cache", nullptr, 0, nullptr, 0, &size);
  NULLS(qf_cache_fetched_positions, "size", c, 0, nullptr, 0, nullptr);
  NULLS(qf_cache_fetched_positions, "out", c, 0, nullptr, 99, &size);
  NULLS(qf_cache_fetched_keys, "cache", nullptr, 0, nullptr, 0, &size);
  NULLS(qf_cache_fetched_keys, "out", c, 0, nullptr, 9999, &size);
  NULLS(qf_cache_fetched_values, "cache", nullptr, 0, nullptr, 0, &size);
  NULLS(qf_cache_settle, "cache", nullptr);
  NULLS(qf_cache_positions, "cache", nullptr, 0, nullptr, 0, &size);
  NULLS(qf_cache_positions, "size", c, 0, nullptr, 0, nullptr);
  NULLS(qf_cache_scores, "cache", nullptr, 0, nullptr, 0, &size);
  NULLS(qf_cache_keys, "cache", nullptr, 0, nullptr, 0, &size);
  NULLS(qf_cache_values, "cache", nullptr, 0, nullptr, 0, &size);
  NULLS(qf_cache_filter, "cache", nullptr, 0, nullptr, 0, &size);
  NULLS(qf_cache_get_stats, "cache", nullptr, &stats, sizeof(stats));
  NULLS(qf_cache_get_stats, "out", c, nullptr, sizeof(stats));
  NULLS(
      qf_cache_make_mask, "cache", nullptr, 2, 1, 0, &mask, nullptr, 0, &size);
  NULLS(qf_cache_make_mask, "mask", c, 2, 1, 0, nullptr, nullptr, 0, &size);
  NULLS(qf_cache_save, "cache", nullptr, nullptr, 0, &size);
  NULLS(qf_cache_save, "size", c, nullptr, 0, nullptr);
  NULLS(qf_cache_save, "out", c, nullptr, 1 << 20, &size);
  NULLS(qf_cache_restore, "cache", nullptr, &size, sizeof(size));
  NULLS(qf_cache_restore, "saved", c, nullptr, 8);
  NULLS(qf_cache_on_warning, "cache", nullptr, nullptr, nullptr);
  NULLS(qf_config_init, "config", nullptr, sizeof(qf_config));
  NULLS(qf_attention_init, "options", nullptr, sizeof(qf_attention));
  EXPECT_EQ(made, nullptr);
}

TEST_F(CApiNullTest, NullForASequenceIsRefused) {
  qf_sequence* made = nullptr;
  qf_sequence* const s = sequence_.get();
  const qf_layer layer{2, 4, 4, 0};
  std::array<std::uint16_t, 8> halves{};
  const qf_tensor keys = qf_tensor_dense(halves.data(), QF_FLOAT16, 1, 2, 1, 4);
  std::size_t size = 0;
  qf_sequence_stats stats;
  NULLS(
      qf_sequence_create,
      "layers",
      nullptr,
      1,
      "full",
      nullptr,
      nullptr,
      &made);
  NULLS(
      qf_sequence_create,
      "policy",
      &layer,
      1,
      nullptr,
      nullptr,
      nullptr,
      &made);
  NULLS(
      qf_sequence_create, "out", &layer, 1, "full", nullptr, nullptr, nullptr);
  NULLS(qf_sequence_begin, "sequence", nullptr, 1);
  NULLS(qf_sequence_append, "sequence", nullptr, 0, &keys, &keys);
  ASSERT_EQ(qf_sequence_begin(s, 1), QF_OK);
  NULLS(qf_sequence_append, "keys", s, 0, nullptr, &keys);
  NULLS(qf_sequence_append, "values", s, 0, &keys, nullptr);
  NULLS(qf_sequence_attend, "sequence", nullptr, 0, &keys, nullptr, nullptr);
  NULLS(qf_sequence_attend, "queries", s, 0, nullptr, nullptr, nullptr);
  NULLS(qf_sequence_attend, "out", s, 0, &keys, nullptr, nullptr);
  NULLS(qf_sequence_commit, "sequence", nullptr);
  NULLS(qf_sequence_rollback, "sequence", nullptr);
  NULLS(qf_sequence_clear, "sequence", nullptr);
  NULLS(qf_sequence_positions, "sequence", nullptr, 0, 0, nullptr, 0, &size);
  NULLS(qf_sequence_positions, "size", s, 0, 0, nullptr, 0, nullptr);
  NULLS(qf_sequence_scores, "sequence", nullptr, 0, 0, nullptr, 0, &size);
  NULLS(qf_sequence_keys, "sequence", nullptr, 0, 0, nullptr, 0, &size);
  NULLS(qf_sequence_values, "sequence", nullptr, 0, 0, nullptr, 0, &size);
  NULLS(qf_sequence_get_stats, "sequence", nullptr, &stats, sizeof(stats));
  NULLS(qf_sequence_get_stats, "out", s, nullptr, sizeof(stats));
  NULLS(qf_sequence_save, "sequence", nullptr, nullptr, 0, &size);
  NULLS(qf_sequence_restore, "sequence", nullptr, &size, 8);
  ASSERT_EQ(qf_sequence_rollback(s), QF_OK);
  NULLS(qf_sequence_save, "size", s, nullptr, 0, nullptr);
  NULLS(qf_sequence_restore, "saved", s, nullptr, 8);
  NULLS(qf_sequence_config_init, "config", nullptr, sizeof(qf_sequence_config));
  NULLS(qf_set_isa, "name", nullptr);
  NULLS(qf_active_isa, "size", nullptr, 0, nullptr);
  NULLS(qf_runnable_isas, "size", nullptr, 0, nullptr);
  EXPECT_EQ(made, nullptr);
}

TEST_F(CApiNullTest, NullIsFreed) {
  qf_filters_free(nullptr);
  qf_cache_free(nullptr);
  qf_sequence_free(nullptr);
}

}  // namespace
}  // namespace qfilters
