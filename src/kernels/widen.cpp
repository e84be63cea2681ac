#include "kernels/widen.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/widen.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/load_half-inl.h"

HWY_BEFORE_NAMESPACE();

namespace qfilters::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
void widen_as(const std::uint16_t* halves, std::size_t count, float* to) {
  const T* from = reinterpret_cast<const T*>(halves);
  const hn::ScalableTag<float> wide;
  const hn::CappedTag<float, 1> one;
  std::size_t i = 0;
  for (; i + hn::Lanes(wide) <= count; i += hn::Lanes(wide))
    hn::StoreU(load_half(wide, from + i), wide, to + i);
  for (; i < count; ++i)
    hn::StoreU(load_half(one, from + i), one, to + i);
}

void widen(const std::uint16_t* from, std::size_t count, Half type, float* to) {
  if (type == Half::kFloat16) {
    widen_as<hwy::float16_t>(from, count, to);
  } else {
    widen_as<hwy::bfloat16_t>(from, count, to);
  }
}

}  // namespace qfilters::kernels::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace qfilters::kernels {

HWY_EXPORT(widen);

void widen(
    const std::uint16_t* from,
    std::size_t count,
    Half type,
    float* to) noexcept {
  HWY_DYNAMIC_DISPATCH(widen)(from, count, type, to);
}

}  // namespace qfilters::kernels

#endif  // HWY_ONCE
