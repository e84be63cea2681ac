#include "kernels/score_keys.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/score_keys.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// After highway.h: it is included once per target.
#include "kernels/load_half-inl.h"

HWY_BEFORE_NAMESPACE();

namespace qfilters::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

constexpr std::size_t kSums = 16;
using Lanes = hn::CappedTag<float, kSums>;
constexpr std::size_t kLanes = hn::MaxLanes(Lanes());
constexpr std::size_t kVectors = kSums / kLanes;

// The order of additions below is the contract (score_keys.h).
template <typename T, bool kSquare>
HWY_INLINE float dot(
    const std::uint16_t* row, const float* filter, std::size_t dim) {
  const Lanes d;
  hn::Vec<Lanes> sums[kVectors];
  for (auto& sum : sums)
    sum = hn::Zero(d);
  const auto add = [&](const std::uint16_t* key, const float* other) HWY_ATTR {
    for (std::size_t v = 0; v < kVectors; ++v) {
      const auto k = load_half(d, reinterpret_cast<const T*>(key + v * kLanes));
      const auto o = kSquare ? k : hn::LoadU(d, other + v * kLanes);
      sums[v] = hn::Add(sums[v], hn::Mul(k, o));
    }
  };
  std::size_t i = 0;
  for (; i + kSums <= dim; i += kSums) {
    add(row + i, kSquare ? nullptr : filter + i);
  }
  if (i < dim) {  // a missing dimension counts as zero
    std::uint16_t key_tail[kSums] = {};
    float filter_tail[kSums] = {};
    std::memcpy(key_tail, row + i, (dim - i) * sizeof(*row));
    if (!kSquare) {
      std::memcpy(filter_tail, filter + i, (dim - i) * sizeof(*filter));
    }
    add(key_tail, filter_tail);
  }
  float partial[kSums];
  for (std::size_t v = 0; v < kVectors; ++v) {
    hn::StoreU(sums[v], d, partial + v * kLanes);
  }
  for (std::size_t half = kSums / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j)
      partial[j] += partial[j + half];
  }
  return partial[0];
}

template <typename T, bool kSquare>
void dot_rows(
    const HalfRows& rows, const float* filter, float sign, float* out) {
  for (std::size_t i = 0; i < rows.rows; ++i) {
    const std::uint16_t* row =
        rows.data + static_cast<std::ptrdiff_t>(i) * rows.stride;
    out[i] = sign * dot<T, kSquare>(row, filter, rows.dim);
  }
}

void project(
    const HalfRows& rows, const float* filter, float sign, float* out) {
  if (rows.type == Half::kFloat16) {
    dot_rows<hwy::float16_t, false>(rows, filter, sign, out);
  } else {
    dot_rows<hwy::bfloat16_t, false>(rows, filter, sign, out);
  }
}

void square(const HalfRows& rows, float* out) {
  if (rows.type == Half::kFloat16) {
    dot_rows<hwy::float16_t, true>(rows, nullptr, 1.0F, out);
  } else {
    dot_rows<hwy::bfloat16_t, true>(rows, nullptr, 1.0F, out);
  }
}

}  // namespace qfilters::kernels::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace qfilters::kernels {

HWY_EXPORT(project);
HWY_EXPORT(square);

void project_rows(
    const HalfRows& rows,
    const float* filter,
    float sign,
    float* out) noexcept {
  HWY_DYNAMIC_DISPATCH(project)(rows, filter, sign, out);
}

void square_rows(const HalfRows& rows, float* out) noexcept {
  HWY_DYNAMIC_DISPATCH(square)(rows, out);
}

}  // namespace qfilters::kernels

#endif  // HWY_ONCE
