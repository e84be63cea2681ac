#include "kernels/quantize_row.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/quantize_row.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/load_half-inl.h"

HWY_BEFORE_NAMESPACE();

namespace qfilters::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Tag = hn::CappedTag<float, 16>;
constexpr std::size_t kLanes = hn::MaxLanes(Tag());

// The largest magnitude of a row, as the bits of its type: they compare as
// integers, infinity and NaN above every number.
HWY_INLINE std::uint16_t largest_bits(
    const std::uint16_t* row, std::size_t dim) {
  constexpr std::uint16_t kMagnitude = 0x7FFF;
  const hn::CappedTag<std::uint16_t, 32> d;
  auto most = hn::Zero(d);
  std::size_t i = 0;
  for (; i + hn::Lanes(d) <= dim; i += hn::Lanes(d)) {
    const auto bits = hn::And(hn::LoadU(d, row + i), hn::Set(d, kMagnitude));
    most = hn::Max(most, bits);
  }
  HWY_ALIGN std::uint16_t lanes[32] = {};
  hn::Store(most, d, lanes);
  std::uint16_t largest = *std::max_element(lanes, lanes + 32);
  for (; i < dim; ++i) {
    largest =
        std::max(largest, static_cast<std::uint16_t>(row[i] & kMagnitude));
  }
  return largest;
}

// 1.5 * 2^23 leaves no bit behind the binary point: adding it rounds to the
// nearest even integer, on every instruction set alike.
template <typename T>
HWY_INLINE void quantize_vector(const T* row, float scale, std::int8_t* out) {
  constexpr float kRound = 0x1.8p23F;
  const Tag d;
  const hn::RebindToSigned<Tag> di;
  const auto x = hn::Div(load_half(d, row), hn::Set(d, scale));
  const auto bits = hn::BitCast(di, hn::Add(x, hn::Set(d, kRound)));
  const auto zero = hn::BitCast(di, hn::Set(d, kRound));
  hn::StoreU(
      hn::DemoteTo(hn::Rebind<std::int8_t, Tag>(), hn::Sub(bits, zero)),
      hn::Rebind<std::int8_t, Tag>(),
      out);
}

template <typename T>
HWY_INLINE float quantize_as(
    const T* row, std::size_t dim, std::int8_t* out, std::size_t stride) {
  constexpr std::uint16_t kInfinity =
      std::is_same_v<T, hwy::float16_t> ? 0x7C00 : 0x7F80;
  const std::uint16_t largest =
      largest_bits(reinterpret_cast<const std::uint16_t*>(row), dim);
  float scale = 0;
  if (largest >= kInfinity) {
    scale = std::numeric_limits<float>::quiet_NaN();
  } else if (largest > 0) {
    T most;
    std::memcpy(&most, &largest, sizeof(most));
    const hn::CappedTag<float, 1> one;
    scale = hn::GetLane(load_half(one, &most)) / 127.0F;
  }
  if (!(scale > 0)) {
    for (std::size_t i = 0; i < dim; ++i)
      out[i * stride] = 0;
    return scale;
  }
  for (std::size_t i = 0; i < dim; i += kLanes) {
    const std::size_t count = std::min(kLanes, dim - i);
    HWY_ALIGN T tail[16] = {};  // not past the end of the row
    if (count < kLanes) std::copy_n(row + i, count, tail);
    HWY_ALIGN std::int8_t lanes[16];
    quantize_vector(count < kLanes ? tail : row + i, scale, lanes);
    for (std::size_t j = 0; j < count; ++j)
      out[(i + j) * stride] = lanes[j];
  }
  return scale;
}

float quantize(
    const std::uint16_t* row,
    std::size_t dim,
    Half type,
    std::int8_t* out,
    std::size_t stride) {
  if (type == Half::kFloat16) {
    return quantize_as(
        reinterpret_cast<const hwy::float16_t*>(row), dim, out, stride);
  }
  return quantize_as(
      reinterpret_cast<const hwy::bfloat16_t*>(row), dim, out, stride);
}

}  // namespace qfilters::kernels::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace qfilters::kernels {

HWY_EXPORT(quantize);

float quantize_row(
    const std::uint16_t* row,
    std::size_t dim,
    Half type,
    std::int8_t* out,
    std::size_t stride) noexcept {
  return HWY_DYNAMIC_DISPATCH(quantize)(row, dim, type, out, stride);
}

}  // namespace qfilters::kernels

#endif  // HWY_ONCE
