#pragma once

// The C API called from C++: tensors and buffers.

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/c_api.h"
#include "qfilters/tensor_view.h"

#include "unit/kv_cache_fixture.h"

namespace qfilters::test {

struct Free {
  void operator()(qf_filters* handle) const { qf_filters_free(handle); }

  void operator()(qf_cache* handle) const { qf_cache_free(handle); }

  void operator()(qf_sequence* handle) const { qf_sequence_free(handle); }
};

using CFilters = std::unique_ptr<qf_filters, Free>;
using CCache = std::unique_ptr<qf_cache, Free>;
using CSequence = std::unique_ptr<qf_sequence, Free>;

inline qf_tensor c_tensor(const TensorView& view) {
  const std::int32_t dtype =
      view.dtype == DType::kFloat32
          ? QF_FLOAT32
          : (view.dtype == DType::kFloat16 ? QF_FLOAT16 : QF_BFLOAT16);
  return {
      view.data,
      dtype,
      view.batch,
      view.heads,
      view.tokens,
      view.dim,
      view.batch_stride,
      view.head_stride,
      view.token_stride};
}

/// What a call with (out, capacity, size) at its end gives: asked for its size
/// first, as a host would.
template <typename T, typename Call>
std::vector<T> read(Call&& call) {
  std::size_t size = 0;
  EXPECT_EQ(call(nullptr, 0, &size), QF_OK) << qf_last_error();
  std::vector<T> out(size);
  EXPECT_EQ(call(out.data(), out.size(), &size), QF_OK) << qf_last_error();
  EXPECT_EQ(size, out.size());
  return out;
}

/// A text without the ending NUL, which must be there.
template <typename Call>
std::string read_text(Call&& call) {
  const auto text = read<char>(call);
  EXPECT_FALSE(text.empty());
  EXPECT_EQ(text.back(), '\0');
  return {text.begin(), text.end() - 1};
}

/// The filters of `layers` layers, all the same.
inline CFilters c_filters(const LayerFilters& filters, std::size_t layers = 1) {
  std::vector<qf_filter_layer> each(
      layers, {filters.heads, filters.dim, filters.values.data()});
  qf_filters* out = nullptr;
  EXPECT_EQ(
      qf_filters_create_layers(each.data(), layers, nullptr, nullptr, &out),
      QF_OK)
      << qf_last_error();
  return CFilters(out);
}

/// The C twin of config_of(): quiet about retention.
inline qf_config c_config(
    std::int64_t budget,
    std::int64_t sinks,
    std::int64_t recent = 0,
    std::int64_t interval = 0) {
  qf_config config;
  EXPECT_EQ(qf_config_init(&config, sizeof(config)), QF_OK);
  config.budget = budget;
  config.n_sink = sinks;
  config.recent = recent;
  config.interval = interval;
  config.on_low_retention = QF_ON_LOW_RETENTION_IGNORE;
  return config;
}

inline CCache c_cache(
    const qf_config& config, const qf_filters* filters = nullptr) {
  qf_cache* out = nullptr;
  EXPECT_EQ(qf_cache_create(&config, filters, 0, &out), QF_OK)
      << qf_last_error();
  return CCache(out);
}

/// The next `count` tokens of `data`, from `first` on, into `cache`.
inline qf_status feed(
    qf_cache* cache,
    const LayerData& data,
    std::size_t first,
    std::size_t count) {
  const qf_tensor keys = c_tensor(data.keys.slice(first, count));
  const qf_tensor values = c_tensor(data.values.slice(first, count));
  return qf_cache_update(cache, &keys, &values);
}

inline std::vector<std::int32_t> positions_of(
    qf_cache* cache, std::size_t group) {
  return read<std::int32_t>([&](auto... buffer) {
    return qf_cache_positions(cache, group, buffer...);
  });
}

inline qf_sequence_config sequence_config() {
  qf_sequence_config config;
  EXPECT_EQ(qf_sequence_config_init(&config, sizeof(config)), QF_OK);
  return config;
}

/// One layer of 2 heads and 4 dimensions.
inline CSequence streaming_sequence(const qf_sequence_config& config) {
  const qf_layer layer{2, 4, 4, 0};
  qf_sequence* out = nullptr;
  EXPECT_EQ(
      qf_sequence_create(&layer, 1, "streaming", &config, nullptr, &out), QF_OK)
      << qf_last_error();
  return CSequence(out);
}

/// One handle of each kind; the cache has seen 30 tokens.
class CApiTest : public ::testing::Test {
 protected:
  CApiTest()
      : filters_(c_filters(data_.filters)),
        cache_(c_cache(c_config(20, 2), filters_.get())),
        sequence_(streaming_sequence(sequence_config())) {
    EXPECT_EQ(feed(cache_.get(), data_, 0, 30), QF_OK);
  }

  /// Expects a refusal whose text begins with the function and has `part`.
  static void refused(
      qf_status got,
      qf_status want,
      const std::string& function,
      const std::string& part) {
    EXPECT_EQ(got, want) << function;
    EXPECT_THAT(qf_last_error(), ::testing::StartsWith(function + ": "));
    EXPECT_THAT(qf_last_error(), ::testing::HasSubstr(part));
  }

  LayerData data_;
  CFilters filters_;
  CCache cache_;
  CSequence sequence_;
};

}  // namespace qfilters::test
