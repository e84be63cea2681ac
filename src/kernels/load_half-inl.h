// One vector of 16-bit elements as float32. Compiled once per target: include
// it after hwy/highway.h, as Highway's own -inl.h files.

#if defined(QFILTERS_KERNELS_LOAD_HALF_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef QFILTERS_KERNELS_LOAD_HALF_INL_H
#undef QFILTERS_KERNELS_LOAD_HALF_INL_H
#else
#define QFILTERS_KERNELS_LOAD_HALF_INL_H
#endif

#include <cstdint>
#include <type_traits>

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();

namespace qfilters::kernels::HWY_NAMESPACE {

// Without a conversion instruction, Highway reads float16 infinity and NaN as
// the finite numbers from 65536 on.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)
inline constexpr bool kPromotesNonFinite = true;
#else
inline constexpr bool kPromotesNonFinite = false;
#endif

template <class D, typename T>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<D> load_half(D d, const T* data) {
  namespace hn = hwy::HWY_NAMESPACE;
  const auto value = hn::PromoteTo(d, hn::LoadU(hn::Rebind<T, D>(), data));
  if constexpr (kPromotesNonFinite || !std::is_same_v<T, hwy::float16_t>) {
    return value;
  } else {
    const auto exponent =
        hn::BitCast(d, hn::Set(hn::RebindToUnsigned<D>(), 0x7F800000U));
    const auto wrong = hn::Ge(hn::Abs(value), hn::Set(d, 65536.0F));
    return hn::Or(value, hn::IfThenElseZero(wrong, exponent));
  }
}

}  // namespace qfilters::kernels::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
