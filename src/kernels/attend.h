#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace qfilters::kernels {

/// A query's softmax over some rows: the largest score, and the sum of
/// exp(score - max), which is 0 if it saw none.
struct Softmax {
  float max;
  float sum;
};

/// Attention of some queries over some rows of one KV head.
struct AttendTask {
  /// Tiles of kTileRows rows each; slots behind the last row may hold anything.
  /// The first `int8_rows` rows lie in int8 tiles (cast to this type), those
  /// behind them begin a tile of their own.
  const std::uint16_t* const* tiles;
  std::size_t tile_count;
  std::size_t int8_rows;  ///< 0: every tile is of `type`
  std::size_t key_dim;
  std::size_t value_dim;
  Half type;
  float soft_cap;  ///< 0: off

  std::size_t queries;
  const float* query;          ///< [queries][key_dim], already scaled
  const std::uint32_t* first;  ///< [queries] visible rows: first <= row < last
  const std::uint32_t* last;
  float* out;        ///< [queries][value_dim], sums of exp(score - max) * value
  Softmax* softmax;  ///< [queries]
};

/// Floats of scratch one call needs; 64-byte alignment helps.
std::size_t attend_scratch(
    std::size_t queries, std::size_t key_dim, std::size_t value_dim) noexcept;

/// Few queries: reads the tiles directly. Many: converts a tile once for
/// all of them. Both give the same bits.
void attend_decode(const AttendTask& task, float* scratch) noexcept;
void attend_prefill(const AttendTask& task, float* scratch) noexcept;

/// Which of a row's weights counts.
enum class Weights : std::uint8_t { kSum, kMax };

/// Adds the weights exp(score - max) / sum of each visible row to `rows`
/// [row], or keeps the largest there; `softmax` is read, `out` is not touched.
void add_weights(const AttendTask& task, Weights which, float* rows) noexcept;

}  // namespace qfilters::kernels
