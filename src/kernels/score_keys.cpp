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

// What is added up for each dimension: k f, k k, or (f + s k) k.
enum class Term { kLinear, kSquare, kQuadratic };

struct Weights {
  const float* linear;  // f, unless kSquare
  const float* square;  // s, kQuadratic only
};

template <Term kTerm>
HWY_INLINE hn::Vec<Lanes> term(
    hn::Vec<Lanes> key, const Weights& weights, std::size_t at) {
  const Lanes d;
  if constexpr (kTerm == Term::kSquare) return hn::Mul(key, key);
  auto factor = hn::LoadU(d, weights.linear + at);
  if constexpr (kTerm == Term::kQuadratic) {
    factor = hn::Add(factor, hn::Mul(hn::LoadU(d, weights.square + at), key));
  }
  return hn::Mul(key, factor);
}

// The order of additions below is the contract (score_keys.h).
template <typename T, Term kTerm>
HWY_INLINE float dot(
    const std::uint16_t* row, const Weights& weights, std::size_t dim) {
  const Lanes d;
  hn::Vec<Lanes> sums[kVectors];
  for (auto& sum : sums)
    sum = hn::Zero(d);
  const auto add = [&](const std::uint16_t* key,
                       const Weights& with,
                       std::size_t at) HWY_ATTR {
    for (std::size_t v = 0; v < kVectors; ++v) {
      const auto k = load_half(d, reinterpret_cast<const T*>(key + v * kLanes));
      sums[v] = hn::Add(sums[v], term<kTerm>(k, with, at + v * kLanes));
    }
  };
  std::size_t i = 0;
  for (; i + kSums <= dim; i += kSums)
    add(row + i, weights, i);
  if (i < dim) {  // a missing dimension counts as zero
    std::uint16_t key_tail[kSums] = {};
    float linear_tail[kSums] = {};
    float square_tail[kSums] = {};
    const std::size_t left = dim - i;
    std::memcpy(key_tail, row + i, left * sizeof(*row));
    if (kTerm != Term::kSquare)
      std::memcpy(linear_tail, weights.linear + i, left * sizeof(float));
    if (kTerm == Term::kQuadratic)
      std::memcpy(square_tail, weights.square + i, left * sizeof(float));
    add(key_tail, {linear_tail, square_tail}, 0);
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

template <Term kTerm>
HWY_INLINE void dot_rows(
    const HalfRows& rows, const Weights& weights, float sign, float* out) {
  const auto each = [&]<typename T>() {
    for (std::size_t i = 0; i < rows.rows; ++i) {
      const std::uint16_t* row =
          rows.data + static_cast<std::ptrdiff_t>(i) * rows.stride;
      out[i] = sign * dot<T, kTerm>(row, weights, rows.dim);
    }
  };
  if (rows.type == Half::kFloat16) {
    each.template operator()<hwy::float16_t>();
  } else {
    each.template operator()<hwy::bfloat16_t>();
  }
}

void project(
    const HalfRows& rows, const float* filter, float sign, float* out) {
  dot_rows<Term::kLinear>(rows, {filter, nullptr}, sign, out);
}

void square(const HalfRows& rows, float* out) {
  dot_rows<Term::kSquare>(rows, {}, 1.0F, out);
}

void quadratic(
    const HalfRows& rows,
    const float* linear,
    const float* square,
    float* out) {
  dot_rows<Term::kQuadratic>(rows, {linear, square}, 1.0F, out);
}

}  // namespace qfilters::kernels::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace qfilters::kernels {

HWY_EXPORT(project);
HWY_EXPORT(square);
HWY_EXPORT(quadratic);

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

void quadratic_rows(
    const HalfRows& rows,
    const float* linear,
    const float* square,
    float* out) noexcept {
  HWY_DYNAMIC_DISPATCH(quadratic)(rows, linear, square, out);
}

}  // namespace qfilters::kernels

#endif  // HWY_ONCE
