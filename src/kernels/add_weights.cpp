#include <algorithm>
#include <cstddef>
#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/add_weights.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/attend.h"
#include "kernels/multiply_keys-inl.h"

HWY_BEFORE_NAMESPACE();

namespace qfilters::kernels::HWY_NAMESPACE {

HWY_INLINE Vec either(Vec a, Vec b, Weights which) {
  return which == Weights::kSum ? hn::Add(a, b) : hn::Max(a, b);
}

// The weights of kN queries, by slot of the tile.
template <std::size_t kN, typename T>
HWY_NOINLINE void add_tile(
    const AttendTask& task,
    Weights which,
    std::size_t query,
    const Tile<T>& tile,
    float* HWY_RESTRICT weights) {
  const Tag d;
  HWY_ALIGN float scores[kN * kTileRows];
  multiply_keys<kN, false>(
      task.query + query * task.key_dim, task.key_dim, tile.keys, 0, scores);
  scale_rows<kN>(tile, 0, scores);
  for (std::size_t i = 0; i < kN; ++i) {
    const Softmax softmax = task.softmax[query + i];
    if (softmax.sum == 0.0F) continue;
    const std::size_t begin = tile.slot(task.first[query + i]);
    const std::size_t end = tile.slot(task.last[query + i]);
    const Vec max = hn::Set(d, softmax.max);
    const Vec factor = hn::Set(d, 1.0F / softmax.sum);
    for (std::size_t c = 0; c < kTileRows; c += kLanes) {
      const Vec s = capped(load(scores + i * kTileRows + c), task.soft_cap);
      const Vec w = hn::IfThenElseZero(
          rows_in(c, begin, end), hn::Mul(hn::Exp(d, hn::Sub(s, max)), factor));
      hn::StoreU(either(load(weights + c), w, which), d, weights + c);
    }
  }
}

void add_weights(const AttendTask& task, Weights which, float* rows) {
  const std::size_t begin =
      *std::min_element(task.first, task.first + task.queries);
  const std::size_t end =
      *std::max_element(task.last, task.last + task.queries);
  visit_tiles(task, begin, end, [&](const auto& tile) HWY_ATTR {
    // Summed by tile first: a sum of sums loses less.
    HWY_ALIGN float weights[kTileRows] = {};
    std::size_t q = 0;
    for (; q + kQueries <= task.queries; q += kQueries)
      add_tile<kQueries>(task, which, q, tile, weights);
    for (; q < task.queries; ++q)
      add_tile<1>(task, which, q, tile, weights);
    for (std::size_t r = tile.slot(begin); r < tile.slot(end); ++r) {
      float& row = rows[tile.first_row + r];
      row =
          which == Weights::kSum ? row + weights[r] : std::max(row, weights[r]);
    }
  });
}

}  // namespace qfilters::kernels::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace qfilters::kernels {

HWY_EXPORT(add_weights);

void add_weights(const AttendTask& task, Weights which, float* rows) noexcept {
  HWY_DYNAMIC_DISPATCH(add_weights)(task, which, rows);
}

}  // namespace qfilters::kernels

#endif  // HWY_ONCE
