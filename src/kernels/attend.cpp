#include "kernels/attend.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <hwy/cache_control.h>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attend.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// After highway.h: it is included once per target.
#include <hwy/contrib/math/math-inl.h>

#include "kernels/load_half-inl.h"

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
// Below any score, yet finite: differences of it never give NaN.
constexpr float kMasked = -1e30F;

HWY_INLINE Vec load(const float* data) {
  return hn::LoadU(Tag(), data);
}

template <typename T>
HWY_INLINE Vec load(const T* data) {
  return load_half(Tag(), data);
}

// Tiles lie anywhere in memory and the hardware does not foresee the next one:
// asks for what lies `ahead` bytes from `at`, if T is what tiles hold.
template <typename T>
HWY_INLINE void prefetch(const T* at, std::ptrdiff_t ahead) {
  if constexpr (sizeof(T) == sizeof(std::uint16_t)) {
    constexpr std::size_t kLine = 64 / sizeof(T);
    const auto there = reinterpret_cast<const T*>(
        reinterpret_cast<std::uintptr_t>(at) +
        static_cast<std::uintptr_t>(ahead));
    for (std::size_t i = 0; i < kStep; i += kLine)
      hwy::Prefetch(there + i);
  }
}

// scores[i][row] = query i . key row, one chain of multiply-adds over the
// dimensions for each score, whatever the tile's element type.
template <std::size_t kN, typename T>
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
      prefetch(row, ahead);
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

template <std::size_t kN, std::size_t kV, typename T>
HWY_INLINE void add_values_at(
    const float* HWY_RESTRICT weights,
    std::size_t begin,
    std::size_t end,
    const T* HWY_RESTRICT values,
    std::size_t value_stride,
    std::ptrdiff_t ahead,
    const float* correction,
    float* HWY_RESTRICT out,
    std::size_t out_stride) {
  const Tag d;
  Vec sums[kN][kV];
  for (std::size_t i = 0; i < kN; ++i) {
    const Vec factor = hn::Set(d, correction[i]);
    for (std::size_t v = 0; v < kV; ++v) {
      sums[i][v] = hn::Mul(load(out + i * out_stride + v * kLanes), factor);
    }
  }
  for (std::size_t r = begin; r < end; ++r) {
    prefetch(values + r * value_stride, ahead);
    Vec value[kV];
    for (std::size_t v = 0; v < kV; ++v) {
      value[v] = load(values + r * value_stride + v * kLanes);
    }
    for (std::size_t i = 0; i < kN; ++i) {
      const Vec w = hn::Set(d, weights[i * kTileRows + r]);
      for (std::size_t v = 0; v < kV; ++v) {
        sums[i][v] = hn::MulAdd(w, value[v], sums[i][v]);
      }
    }
  }
  for (std::size_t i = 0; i < kN; ++i) {
    for (std::size_t v = 0; v < kV; ++v) {
      hn::StoreU(sums[i][v], d, out + i * out_stride + v * kLanes);
    }
  }
}

// out[i] = out[i] * correction[i] + sum over rows of weight * value row.
template <std::size_t kN, typename T>
HWY_INLINE void add_values(
    const float* weights,
    std::size_t begin,
    std::size_t end,
    const T* values,
    std::size_t value_stride,
    std::ptrdiff_t ahead,
    const float* correction,
    float* out,
    std::size_t out_stride) {
  std::size_t c = 0;
  for (; c + kStep <= out_stride; c += kStep) {
    add_values_at<kN, kVectors>(
        weights,
        begin,
        end,
        values + c,
        value_stride,
        ahead,
        correction,
        out + c,
        out_stride);
  }
  for (; c < out_stride; c += kLanes) {
    add_values_at<kN, 1>(
        weights,
        begin,
        end,
        values + c,
        value_stride,
        ahead,
        correction,
        out + c,
        out_stride);
  }
}

// The same for one query and rows that its neighbours may not see. Not
// inlined: it is rare, and compiling it into every caller takes minutes.
template <typename T>
HWY_NOINLINE void add_alone(
    const float* weights,
    std::size_t begin,
    std::size_t end,
    const T* values,
    std::size_t value_stride,
    float& correction,
    float* out,
    std::size_t out_stride) {
  if (begin >= end) return;
  add_values<1>(
      weights,
      begin,
      end,
      values,
      value_stride,
      0,
      &correction,
      out,
      out_stride);
  correction = 1.0F;
}

// The running state of one query's online softmax.
struct Softmax {
  float max;
  float sum;
};

// Turns a tile's scores into weights, rows outside [begin, end) into zero;
// returns the factor for what was summed before.
HWY_INLINE float update_softmax(
    float* scores,
    std::size_t begin,
    std::size_t end,
    float soft_cap,
    Softmax& state) {
  const Tag d;
  const hn::RebindToSigned<Tag> di;
  const auto lo = hn::Set(di, static_cast<std::int32_t>(begin) - 1);
  const auto hi = hn::Set(di, static_cast<std::int32_t>(end));
  const auto visible = [&](std::size_t c) HWY_ATTR {
    const auto row = hn::Iota(di, static_cast<std::int32_t>(c));
    return hn::RebindMask(d, hn::And(hn::Gt(row, lo), hn::Gt(hi, row)));
  };
  const Vec masked = hn::Set(d, kMasked);
  Vec tile_max = masked;
  for (std::size_t c = 0; c < kTileRows; c += kLanes) {
    Vec s = load(scores + c);
    if (soft_cap != 0.0F) {
      const Vec scaled = hn::Mul(s, hn::Set(d, 1.0F / soft_cap));
      s = hn::Mul(hn::Set(d, soft_cap), hn::Tanh(d, scaled));
    }
    s = hn::IfThenElse(visible(c), s, masked);
    tile_max = hn::Max(tile_max, s);
    hn::StoreU(s, d, scores + c);
  }
  const float old_max = state.max;
  state.max = std::max(old_max, hn::GetLane(hn::MaxOfLanes(d, tile_max)));
  const Vec max = hn::Set(d, state.max);
  Vec sum = hn::Zero(d);
  for (std::size_t c = 0; c < kTileRows; c += kLanes) {
    const Vec w = hn::IfThenElseZero(
        visible(c), hn::Exp(d, hn::Sub(load(scores + c), max)));
    sum = hn::Add(sum, w);
    hn::StoreU(w, d, scores + c);
  }
  const float correction =
      hn::GetLane(hn::Exp(d, hn::Sub(hn::Set(d, old_max), max)));
  state.sum = state.sum * correction + hn::GetLane(hn::SumOfLanes(d, sum));
  return correction;
}

// Scratch of one call, see attend_scratch().
struct Work {
  float* out;      // [queries][out_stride]
  float* keys;     // [key_dim][kTileRows], prefill only
  float* values;   // [kTileRows][out_stride], prefill only
  Softmax* state;  // [queries]
  std::size_t out_stride;
  std::ptrdiff_t ahead;  // bytes from this tile to the next, decode only
};

template <std::size_t kN, typename T>
HWY_NOINLINE void attend_group(
    const AttendTask& task,
    const Work& work,
    std::size_t query,
    std::size_t first_row,
    const T* keys,
    const T* values,
    std::size_t value_stride) {
  // Each query's rows of this tile, and those that all of them see.
  std::size_t from[kN];
  std::size_t to[kN];
  std::size_t begin = 0;
  std::size_t end = kTileRows;
  bool any = false;
  for (std::size_t i = 0; i < kN; ++i) {
    const std::size_t first = task.first[query + i];
    const std::size_t last = task.last[query + i];
    from[i] = std::min(std::max(first, first_row) - first_row, kTileRows);
    to[i] = std::min(std::max(last, first_row) - first_row, kTileRows);
    begin = std::max(begin, from[i]);
    end = std::min(end, to[i]);
    any = any || from[i] < to[i];
  }
  if (!any) return;
  if (begin >= end) begin = end = kTileRows;
  HWY_ALIGN float scores[kN * kTileRows];
  float correction[kN];
  multiply_keys<kN>(
      task.query + query * task.key_dim,
      task.key_dim,
      keys,
      work.ahead,
      scores);
  for (std::size_t i = 0; i < kN; ++i) {
    if (from[i] >= to[i]) continue;
    correction[i] = update_softmax(
        scores + i * kTileRows,
        from[i],
        to[i],
        task.soft_cap,
        work.state[query + i]);
  }
  // A row that a query does not see must not reach it, not even as zero times
  // infinity: rows that only some queries see are added one query at a time.
  float* const out = work.out + query * work.out_stride;
  for (std::size_t i = 0; i < kN; ++i) {
    add_alone(
        scores + i * kTileRows,
        from[i],
        std::min(begin, to[i]),
        values,
        value_stride,
        correction[i],
        out + i * work.out_stride,
        work.out_stride);
  }
  if (begin < end) {
    add_values<kN>(
        scores,
        begin,
        end,
        values,
        value_stride,
        work.ahead,
        correction,
        out,
        work.out_stride);
    std::fill_n(correction, kN, 1.0F);
  }
  for (std::size_t i = 0; i < kN; ++i) {
    add_alone(
        scores + i * kTileRows,
        end,
        to[i],
        values,
        value_stride,
        correction[i],
        out + i * work.out_stride,
        work.out_stride);
  }
}

template <typename T>
HWY_INLINE void attend_tile(
    const AttendTask& task,
    const Work& work,
    std::size_t first_row,
    const T* keys,
    const T* values,
    std::size_t value_stride) {
  std::size_t q = 0;
  for (; q + kQueries <= task.queries; q += kQueries) {
    attend_group<kQueries>(
        task, work, q, first_row, keys, values, value_stride);
  }
  const auto rest = [&]<std::size_t kN>() {
    attend_group<kN>(task, work, q, first_row, keys, values, value_stride);
  };
  switch (task.queries - q) {
    case 5:
      return rest.template operator()<5>();
    case 4:
      return rest.template operator()<4>();
    case 3:
      return rest.template operator()<3>();
    case 2:
      return rest.template operator()<2>();
    case 1:
      return rest.template operator()<1>();
    default:
      return;
  }
}

template <typename T>
HWY_INLINE void convert_tile(
    const AttendTask& task, const Work& work, const T* keys, const T* values) {
  const Tag d;
  for (std::size_t i = 0; i < task.key_dim * kTileRows; i += kLanes) {
    hn::StoreU(load(keys + i), d, work.keys + i);
  }
  for (std::size_t r = 0; r < kTileRows; ++r) {
    const T* row = values + r * task.value_dim;
    float* out = work.values + r * work.out_stride;
    std::size_t c = 0;
    for (; c + kLanes <= task.value_dim; c += kLanes) {
      hn::StoreU(load(row + c), d, out + c);
    }
    if (c < task.value_dim) {  // not past the end of the tile
      HWY_ALIGN T tail[16] = {};
      std::copy(row + c, row + task.value_dim, tail);
      hn::StoreU(load(tail), d, out + c);
    }
  }
}

template <typename T>
void attend_tiles(const AttendTask& task, float* scratch, bool convert) {
  Work work;
  work.out_stride = (task.value_dim + kLanes - 1) / kLanes * kLanes;
  work.out = scratch;
  work.keys = work.out + task.queries * work.out_stride;
  work.values = work.keys + task.key_dim * kTileRows;
  work.state =
      reinterpret_cast<Softmax*>(work.values + kTileRows * work.out_stride);
  std::fill_n(work.out, task.queries * work.out_stride, 0.0F);
  std::fill_n(work.state, task.queries, Softmax{kMasked, 0.0F});

  std::size_t begin = task.first[0];
  std::size_t end = 0;
  for (std::size_t q = 0; q < task.queries; ++q) {
    begin = std::min<std::size_t>(begin, task.first[q]);
    end = std::max<std::size_t>(end, task.last[q]);
  }
  for (std::size_t row = begin / kTileRows * kTileRows; row < end;
       row += kTileRows) {
    const T* keys = reinterpret_cast<const T*>(task.tiles[row / kTileRows]);
    const T* values = keys + task.key_dim * kTileRows;
    const bool last = row + kTileRows >= end;
    const auto* next = task.tiles[row / kTileRows + (last ? 0 : 1)];
    work.ahead = static_cast<std::ptrdiff_t>(
        reinterpret_cast<std::uintptr_t>(next) -
        reinterpret_cast<std::uintptr_t>(keys));
    if (convert) {
      convert_tile(task, work, keys, values);
      attend_tile<float>(
          task, work, row, work.keys, work.values, work.out_stride);
    } else {
      attend_tile<T>(task, work, row, keys, values, task.value_dim);
    }
  }
  for (std::size_t q = 0; q < task.queries; ++q) {
    const float sum = work.state[q].sum;
    const float* from = work.out + q * work.out_stride;
    float* out = task.out + q * task.value_dim;
    for (std::size_t c = 0; c < task.value_dim; ++c) {
      out[c] = sum == 0.0F ? 0.0F : from[c] / sum;
    }
  }
}

void attend(const AttendTask& task, float* scratch, bool convert) {
  // Whole vectors of a value row must not reach past the tile.
  convert = convert || task.value_dim % kLanes != 0;
  if (task.type == Half::kFloat16) {
    attend_tiles<hwy::float16_t>(task, scratch, convert);
  } else {
    attend_tiles<hwy::bfloat16_t>(task, scratch, convert);
  }
}

}  // namespace qfilters::kernels::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace qfilters::kernels {

HWY_EXPORT(attend);

std::size_t attend_scratch(
    std::size_t queries, std::size_t key_dim, std::size_t value_dim) noexcept {
  const std::size_t padded = (value_dim + 15) / 16 * 16;
  return queries * padded + (key_dim + padded) * kTileRows + 2 * queries;
}

void attend_decode(const AttendTask& task, float* scratch) noexcept {
  HWY_DYNAMIC_DISPATCH(attend)(task, scratch, false);
}

void attend_prefill(const AttendTask& task, float* scratch) noexcept {
  HWY_DYNAMIC_DISPATCH(attend)(task, scratch, true);
}

}  // namespace qfilters::kernels

#endif  // HWY_ONCE
