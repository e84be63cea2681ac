#include "kernels/attend.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attend.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/multiply_keys-inl.h"

HWY_BEFORE_NAMESPACE();

namespace qfilters::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Below any score, yet finite: differences of it never give NaN.
constexpr float kMasked = -1e30F;

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
    prefetch<false>(values + r * value_stride, ahead);
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

// Turns the scores of kN queries with a tile into weights, of rows outside
// [from, to) into zero; `correction` is the factor for what was summed before.
// The queries go step by step together: each step waits for the one before it.
template <std::size_t kN>
HWY_INLINE void update_softmax(
    float* HWY_RESTRICT scores,
    const std::size_t* from,
    const std::size_t* to,
    float soft_cap,
    Softmax* HWY_RESTRICT state,
    float* HWY_RESTRICT correction) {
  const Tag d;
  const Vec masked = hn::Set(d, kMasked);
  for (std::size_t i = 0; i < kN; ++i) {
    Vec max = masked;
    for (std::size_t c = 0; c < kTileRows; c += kLanes) {
      float* const at = scores + i * kTileRows + c;
      const Vec s = hn::IfThenElse(
          rows_in(c, from[i], to[i]), capped(load(at), soft_cap), masked);
      max = hn::Max(max, s);
      hn::StoreU(s, d, at);
    }
    const float old_max = state[i].max;
    state[i].max = std::max(old_max, hn::GetLane(hn::MaxOfLanes(d, max)));
    correction[i] = old_max - state[i].max;
  }
  for (std::size_t i = 0; i < kN; i += kLanes) {
    hn::StoreU(hn::Exp(d, load(correction + i)), d, correction + i);
  }
  for (std::size_t i = 0; i < kN; ++i) {
    const Vec max = hn::Set(d, state[i].max);
    Vec sum = hn::Zero(d);
    for (std::size_t c = 0; c < kTileRows; c += kLanes) {
      float* const at = scores + i * kTileRows + c;
      const Vec w = hn::IfThenElseZero(
          rows_in(c, from[i], to[i]), hn::Exp(d, hn::Sub(load(at), max)));
      sum = hn::Add(sum, w);
      hn::StoreU(w, d, at);
    }
    state[i].sum =
        state[i].sum * correction[i] + hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

HWY_INLINE std::ptrdiff_t bytes_between(const void* from, const void* to) {
  return static_cast<std::ptrdiff_t>(
      reinterpret_cast<std::uintptr_t>(to) -
      reinterpret_cast<std::uintptr_t>(from));
}

// Scratch of one call, see attend_scratch().
struct Work {
  float* out;     // [queries][out_stride]
  float* keys;    // [key_dim][kTileRows], prefill only
  float* values;  // [kTileRows][out_stride], prefill only
  std::size_t out_stride;
  std::ptrdiff_t ahead;  // bytes from these values to the next keys
};

// They are needed once the scores are there.
HWY_INLINE void prefetch_scales(const float* scales) {
  for (std::size_t i = 0; i < 2 * kTileRows; i += 64 / sizeof(float))
    __builtin_prefetch(scales + i);
}

template <std::size_t kN, typename T>
HWY_NOINLINE void attend_group(
    const AttendTask& task,
    const Work& work,
    std::size_t query,
    const Tile<T>& tile) {
  // Each query's rows of this tile, and those that all of them see.
  std::size_t from[kN];
  std::size_t to[kN];
  std::size_t begin = 0;
  std::size_t end = kTileRows;
  bool any = false;
  for (std::size_t i = 0; i < kN; ++i) {
    from[i] = tile.slot(task.first[query + i]);
    to[i] = tile.slot(task.last[query + i]);
    begin = std::max(begin, from[i]);
    end = std::min(end, to[i]);
    any = any || from[i] < to[i];
  }
  if (!any) return;
  if (begin >= end) begin = end = kTileRows;
  HWY_ALIGN float scores[kN * kTileRows];
  HWY_ALIGN float correction[16] = {};  // whole vectors
  const auto multiply = [&](auto wide) HWY_ATTR {
    multiply_keys<kN, wide.value>(
        task.query + query * task.key_dim,
        task.key_dim,
        tile.keys,
        bytes_between(tile.keys, tile.values),
        scores);
  };
  if (sizeof(T) < sizeof(float) && task.key_dim * sizeof(T) > kWideKeys) {
    multiply(std::true_type());
  } else {
    multiply(std::false_type());
  }
  scale_rows<kN>(tile, 0, scores);
  update_softmax<kN>(
      scores, from, to, task.soft_cap, task.softmax + query, correction);
  // The softmax has its sums: from here on weights belong to int8 values.
  scale_rows<kN>(tile, kTileRows, scores);
  // A row that a query does not see must not reach it, not even as zero times
  // infinity: rows that only some queries see are added one query at a time.
  float* const out = work.out + query * work.out_stride;
  const auto alone = [&](std::size_t i, std::size_t b, std::size_t e) {
    if (b >= e) return;
    add_alone(
        scores + i * kTileRows,
        b,
        e,
        tile.values,
        tile.value_stride,
        correction[i],
        out + i * work.out_stride,
        work.out_stride);
  };
  for (std::size_t i = 0; i < kN; ++i)
    alone(i, from[i], std::min(begin, to[i]));
  if (begin < end) {
    add_values<kN>(
        scores,
        begin,
        end,
        tile.values,
        tile.value_stride,
        work.ahead,
        correction,
        out,
        work.out_stride);
    std::fill_n(correction, kN, 1.0F);
  }
  for (std::size_t i = 0; i < kN; ++i)
    alone(i, end, to[i]);
}

template <typename T>
HWY_INLINE void attend_tile(
    const AttendTask& task, const Work& work, const Tile<T>& tile) {
  std::size_t q = 0;
  for (; q + kQueries <= task.queries; q += kQueries) {
    attend_group<kQueries>(task, work, q, tile);
  }
  const auto rest = [&]<std::size_t kN>() {
    attend_group<kN>(task, work, q, tile);
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
HWY_INLINE Tile<float> convert_tile(
    const AttendTask& task, const Work& work, const Tile<T>& tile) {
  const Tag d;
  for (std::size_t i = 0; i < task.key_dim * kTileRows; i += kLanes) {
    hn::StoreU(load(tile.keys + i), d, work.keys + i);
  }
  for (std::size_t r = 0; r < kTileRows; ++r) {
    const T* row = tile.values + r * task.value_dim;
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
  return {
      work.keys,
      work.values,
      work.out_stride,
      tile.scales,
      tile.first_row,
      tile.rows,
      tile.next};
}

void attend(const AttendTask& task, float* scratch, bool convert) {
  // Whole vectors of a value row must not reach past the tile.
  convert = convert || task.value_dim % kLanes != 0;
  Work work;
  work.out_stride = (task.value_dim + kLanes - 1) / kLanes * kLanes;
  work.out = scratch;
  work.keys = work.out + task.queries * work.out_stride;
  work.values = work.keys + task.key_dim * kTileRows;
  std::fill_n(work.out, task.queries * work.out_stride, 0.0F);
  std::fill_n(task.softmax, task.queries, Softmax{kMasked, 0.0F});

  std::size_t begin = task.first[0];
  std::size_t end = 0;
  for (std::size_t q = 0; q < task.queries; ++q) {
    begin = std::min<std::size_t>(begin, task.first[q]);
    end = std::max<std::size_t>(end, task.last[q]);
  }
  visit_tiles(task, begin, end, [&](const auto& tile) HWY_ATTR {
    work.ahead = bytes_between(tile.values, tile.next);
    if (convert) {
      attend_tile(task, work, convert_tile(task, work, tile));
      return;
    }
    if (tile.scales != nullptr) prefetch_scales(tile.scales);
    attend_tile(task, work, tile);
  });
  for (std::size_t q = 0; q < task.queries; ++q) {
    std::copy_n(
        work.out + q * work.out_stride,
        task.value_dim,
        task.out + q * task.value_dim);
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
  return queries * padded + (key_dim + padded) * kTileRows;
}

void attend_decode(const AttendTask& task, float* scratch) noexcept {
  HWY_DYNAMIC_DISPATCH(attend)(task, scratch, false);
}

void attend_prefill(const AttendTask& task, float* scratch) noexcept {
  HWY_DYNAMIC_DISPATCH(attend)(task, scratch, true);
}

}  // namespace qfilters::kernels

#endif  // HWY_ONCE
