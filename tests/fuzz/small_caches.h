#pragma once

// The caches that foreign snapshots are restored into, and rows to continue
// with. Small, so that an input of a few KiB can be a whole snapshot.

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include "qfilters/attention.h"
#include "qfilters/kv_cache.h"
#include "qfilters/sequence_cache.h"

namespace qfilters::fuzz {

inline constexpr std::array<std::string_view, 3> kPolicies = {
    "full", "qfilters", "random"};

inline constexpr std::array kFormats = {RowFormat::kSame, RowFormat::kInt8};

/// A global and a windowed layer.
inline SequenceCache small_sequence(std::string_view policy, RowFormat format) {
  SequenceOptions sequence;
  sequence.format = format;
  PolicyOptions options;
  options.budget = 8;
  options.protection = {2, 2};
  options.interval = 3;
  const LayerFilters filters{2, 3, {1, -2, 0.5F, 0, 1, -1}};
  const LayerFilters unused{1, 2, {1, 1}};
  return {
      {{2, 3, 2, 0}, {1, 2, 3, 70}},
      Policy::make(
          policy,
          options,
          std::make_shared<const FilterBank>(
              std::vector{filters, unused}, FilterMetadata{})),
      sequence};
}

/// With filters, or finding them after 12 tokens.
inline QFiltersKVCache small_cache(bool calibrated) {
  Config config;
  config.qfilters_budget = 8;
  config.qfilters_n_sink = 2;
  config.qfilters_recent = 2;
  config.qfilters_interval = 3;
  config.qfilters_calib_tokens = 12;
  if (!calibrated) return QFiltersKVCache(config);
  return QFiltersKVCache(config, LayerFilters{2, 3, {1, -2, 0.5F, 0, 1, -1}});
}

/// Owned rows [batch, heads, tokens, dim] of numbers between 1 and 2.
class Rows {
 public:
  Rows(
      std::size_t batch,
      std::size_t heads,
      std::size_t tokens,
      std::size_t dim,
      DType dtype)
      : data_(batch * heads * tokens * dim),
        view_(
            TensorView::dense(data_.data(), dtype, batch, heads, tokens, dim)) {
    const std::uint16_t one = dtype == DType::kFloat16 ? 0x3C00 : 0x3F80;
    for (std::size_t i = 0; i < data_.size(); ++i) {
      data_[i] = static_cast<std::uint16_t>(one + i * 37 % 128);
    }
  }

  [[nodiscard]] const TensorView& view() const noexcept { return view_; }

 private:
  std::vector<std::uint16_t> data_;
  TensorView view_;
};

/// One query per new token and KV head over all rows.
inline void attend_over(const RowsView& rows) {
  const RowShape& s = rows.shape();
  const std::size_t queries = s.groups() * rows.new_rows();
  const std::vector<float> query(queries * s.key_dim, 0.5F);
  std::vector<float> out(queries * s.value_dim);
  attend(
      TensorView::dense(
          query.data(),
          DType::kFloat32,
          s.batch,
          s.kv_heads,
          rows.new_rows(),
          s.key_dim),
      rows,
      {},
      OutputView::dense(
          out.data(), s.batch, s.kv_heads, rows.new_rows(), s.value_dim));
}

inline constexpr std::array<std::size_t, 3> kUpdates = {1, 70, 5};

/// Whether positions leave room for kUpdates.
inline bool can_continue(std::size_t offset) {
  return offset + 100 <
         static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max());
}

inline void update(SequenceCache& cache, std::size_t tokens) {
  cache.begin(tokens);
  std::vector<Rows> rows;
  for (std::size_t l = 0; l < cache.layers(); ++l) {
    const RowShape& s = cache.store(l).shape();
    rows.emplace_back(s.batch, s.kv_heads, tokens, s.key_dim, s.dtype);
    rows.emplace_back(s.batch, s.kv_heads, tokens, s.value_dim, s.dtype);
    cache.append(l, rows[2 * l].view(), rows[2 * l + 1].view());
    attend_over(cache.rows(l));
  }
  cache.commit();
}

inline void update(QFiltersKVCache& cache, std::size_t tokens) {
  RowShape s{1, 2, 3, 2, DType::kFloat16};
  if (!cache.empty()) s = cache.stored().shape();
  const Rows keys(s.batch, s.kv_heads, tokens, s.key_dim, s.dtype);
  const Rows values(s.batch, s.kv_heads, tokens, s.value_dim, s.dtype);
  attend_over(cache.update_and_fetch(keys.view(), values.view()));
}

}  // namespace qfilters::fuzz
