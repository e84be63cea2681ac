#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace qfilters::kernels {

/// Attention of some queries over the rows of one KV head.
struct AttendTask {
  /// Tile i holds rows [i * kTileRows, (i + 1) * kTileRows); slots behind the
  /// last row may hold anything.
  const std::uint16_t* const* tiles;
  std::size_t key_dim;
  std::size_t value_dim;
  Half type;
  float soft_cap;  ///< 0: off

  std::size_t queries;
  const float* query;          ///< [queries][key_dim], already scaled
  const std::uint32_t* first;  ///< [queries] visible rows: first <= row < last
  const std::uint32_t* last;
  float* out;  ///< [queries][value_dim]
};

/// Floats of scratch one call needs; 64-byte alignment helps.
std::size_t attend_scratch(
    std::size_t queries, std::size_t key_dim, std::size_t value_dim) noexcept;

/// Few queries: reads 16-bit tiles directly. Many: converts a tile once for
/// all of them. Both give the same bits.
void attend_decode(const AttendTask& task, float* scratch) noexcept;
void attend_prefill(const AttendTask& task, float* scratch) noexcept;

}  // namespace qfilters::kernels
