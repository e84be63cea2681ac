// The tiles of a task, scores of queries with a tile's keys, and what attention
// does to a score.
// Compiled once per target: include it after hwy/highway.h.

#if defined(QFILTERS_KERNELS_MULTIPLY_KEYS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef QFILTERS_KERNELS_MULTIPLY_KEYS_INL_H
#undef QFILTERS_KERNELS_MULTIPLY_KEYS_INL_H
#else
#define QFILTERS_KERNELS_MULTIPLY_KEYS_INL_H
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include <hwy/highway.h>
// After highway.h: it is included once per target.
#include <hwy/contrib/math/math-inl.h>

#include "kernels/attend.h"
#include "kernels/load_half-inl.h"
#include "kernels/types.h"

HWY_BEFORE_NAMESPACE();

namespace qfilters::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Tag = hn::CappedTag<float, 16>;
using Vec = hn::Vec<Tag>;
constexpr std::size_t kLanes = hn::MaxLanes(Tag());
// Registers bound the micro-kernels: kQueries x kVectors sums, kVectors rows
// and one broadcast must fit (32 registers with AVX-512, else 16).
constexpr std::size_t kVectors = kLanes == 16 ? 4 : (kLanes == 1 ? 4 : 2);
constexpr std::size_t kQueries = 6;
constexpr std::size_t kStep = kVectors * kLanes;

HWY_INLINE Vec load(const float* data) {
  return hn::LoadU(Tag(), data);
}

HWY_INLINE Vec load(const std::int8_t* data) {
  const hn::RebindToSigned<Tag> d;
  const auto bytes = hn::LoadU(hn::Rebind<std::int8_t, Tag>(), data);
  return hn::ConvertTo(Tag(), hn::PromoteTo(d, bytes));
}

template <typename T>
HWY_INLINE Vec load(const T* data) {
  return load_half(Tag(), data);
}

// Some rows of a task in a tile of T, `first_row` and those behind it.
template <typename T>
struct Tile {
  const T* keys;    // [key_dim][kTileRows]
  const T* values;  // [kTileRows][value_stride]
  std::size_t value_stride;
  const float* scales;  // of int8 keys, then of the values; else null
  std::size_t first_row;
  std::size_t rows;  // at most kTileRows
  const void* next;  // the tile behind it, or itself

  // Where a row of the task would lie, 0 or `rows` if it is not here.
  [[nodiscard]] HWY_INLINE std::size_t slot(std::size_t row) const {
    return std::min(std::max(row, first_row) - first_row, rows);
  }
};

// Calls visit(tile) for each tile of T that holds a row of [begin, end), in
// order. Tile `first` is the first one of T, its rows are first_row to end_row.
template <typename T, typename Visit>
HWY_INLINE void visit_tiles_of(
    const AttendTask& task,
    std::size_t first,
    std::size_t first_row,
    std::size_t end_row,
    std::size_t begin,
    std::size_t end,
    const Visit& visit) {
  begin = std::max(begin, first_row);
  end = std::min(end, end_row);
  if (begin >= end) return;
  const std::size_t skipped = (begin - first_row) / kTileRows;
  std::size_t tile = first + skipped;
  for (std::size_t row = first_row + skipped * kTileRows; row < end;
       row += kTileRows, ++tile) {
    const T* keys = reinterpret_cast<const T*>(task.tiles[tile]);
    const T* values = keys + task.key_dim * kTileRows;
    const void* behind = values + task.value_dim * kTileRows;
    visit(Tile<T>{
        keys,
        values,
        task.value_dim,
        std::is_same_v<T, std::int8_t> ? static_cast<const float*>(behind)
                                       : nullptr,
        row,
        std::min(kTileRows, end_row - row),
        task.tiles[std::min(tile + 1, task.tile_count - 1)]});
  }
}

// The same for all tiles.
template <typename Visit>
HWY_INLINE void visit_tiles(
    const AttendTask& task,
    std::size_t begin,
    std::size_t end,
    const Visit& visit) {
  constexpr std::size_t kEnd = std::numeric_limits<std::size_t>::max();
  const std::size_t int8 = task.int8_rows;
  const std::size_t first = (int8 + kTileRows - 1) / kTileRows;
  visit_tiles_of<std::int8_t>(task, 0, 0, int8, begin, end, visit);
  if (task.type == Half::kFloat16) {
    visit_tiles_of<hwy::float16_t>(task, first, int8, kEnd, begin, end, visit);
  } else {
    visit_tiles_of<hwy::bfloat16_t>(task, first, int8, kEnd, begin, end, visit);
  }
}

// Keys of more bytes a row fill most of a level 1 cache.
constexpr std::size_t kWideKeys = 256;

// Tiles lie anywhere in memory and the hardware does not foresee the next one:
// asks for what lies `ahead` bytes from `at`, if T is what tiles hold. Beside
// wide keys it waits in the level 2 cache.
template <bool kWide, typename T>
HWY_INLINE void prefetch(const T* at, std::ptrdiff_t ahead) {
  if constexpr (!std::is_same_v<T, float>) {
    constexpr std::size_t kLine = 64 / sizeof(T);
    const auto there = reinterpret_cast<const T*>(
        reinterpret_cast<std::uintptr_t>(at) +
        static_cast<std::uintptr_t>(ahead));
    for (std::size_t i = 0; i < kStep; i += kLine)
      __builtin_prefetch(there + i, 0, kWide ? 2 : 3);
  }
}

// scores[i][row] = query i . key row, one chain of multiply-adds over the
// dimensions for each score, whatever the tile's element type.
template <std::size_t kN, bool kWide, typename T>
HWY_INLINE void multiply_keys(
    const float* HWY_RESTRICT query,
    std::size_t dim,
    const T* HWY_RESTRICT keys,
    std::ptrdiff_t ahead,
    float* HWY_RESTRICT scores) {
  const Tag d;
  for (std::size_t c = 0; c < kTileRows; c += kStep) {
    Vec sums[kN][kVectors];
    for (std::size_t i = 0; i < kN; ++i) {
      for (std::size_t v = 0; v < kVectors; ++v)
        sums[i][v] = hn::Zero(d);
    }
    const T* row = keys + c;
    for (std::size_t k = 0; k < dim; ++k, row += kTileRows) {
      prefetch<kWide>(row, ahead);
      Vec key[kVectors];
      for (std::size_t v = 0; v < kVectors; ++v) {
        key[v] = load(row + v * kLanes);
      }
      for (std::size_t i = 0; i < kN; ++i) {
        const Vec q = hn::Set(d, query[i * dim + k]);
        for (std::size_t v = 0; v < kVectors; ++v) {
          sums[i][v] = hn::MulAdd(q, key[v], sums[i][v]);
        }
      }
    }
    for (std::size_t i = 0; i < kN; ++i) {
      for (std::size_t v = 0; v < kVectors; ++v) {
        hn::StoreU(sums[i][v], d, scores + i * kTileRows + c + v * kLanes);
      }
    }
  }
}

// scores[i][row] *= scales[row], where a tile has scales: first those of its
// keys, then those of its values.
template <std::size_t kN, typename T>
HWY_INLINE void scale_rows(
    const Tile<T>& tile, std::size_t first, float* HWY_RESTRICT scores) {
  if (sizeof(T) == sizeof(std::uint16_t) || tile.scales == nullptr) return;
  for (std::size_t c = 0; c < kTileRows; c += kLanes) {
    const Vec scale = load(tile.scales + first + c);
    for (std::size_t i = 0; i < kN; ++i) {
      float* const at = scores + i * kTileRows + c;
      hn::StoreU(hn::Mul(load(at), scale), Tag(), at);
    }
  }
}

HWY_INLINE Vec capped(Vec score, float soft_cap) {
  if (soft_cap == 0.0F) return score;
  const Tag d;
  const Vec scaled = hn::Mul(score, hn::Set(d, 1.0F / soft_cap));
  return hn::Mul(hn::Set(d, soft_cap), hn::Tanh(d, scaled));
}

// Which of a tile's rows c, c + 1, ... lie in [begin, end).
HWY_INLINE hn::Mask<Tag> rows_in(
    std::size_t c, std::size_t begin, std::size_t end) {
  const hn::RebindToSigned<Tag> d;
  const auto row = hn::Iota(d, static_cast<std::int32_t>(c));
  const auto lo = hn::Set(d, static_cast<std::int32_t>(begin) - 1);
  const auto hi = hn::Set(d, static_cast<std::int32_t>(end));
  return hn::RebindMask(Tag(), hn::And(hn::Gt(row, lo), hn::Gt(hi, row)));
}

}  // namespace qfilters::kernels::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
