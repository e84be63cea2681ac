#include "kernels/move_rows.h"

#include <cstring>

#include "kernels/types.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/move_rows.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();

namespace qfilters::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// At least a vector of slots in each dimension. Ascending stores never reach a
// slot that is still to be read; the last vector overlaps the one before it,
// so it is read first.
template <class Tag, typename T = hn::TFromD<Tag>>
HWY_INLINE void move_keys(const RowMove& move, std::size_t key_dim, Tag d) {
  const std::size_t last = move.count - hn::Lanes(d);
  const T* from = reinterpret_cast<const T*>(move.from_tile) + move.from;
  T* to = reinterpret_cast<T*>(move.to_tile) + move.to;
  for (std::size_t k = 0; k < key_dim; ++k) {
    const auto tail = hn::LoadU(d, from + last);
    for (std::size_t i = 0; i < last; i += hn::Lanes(d)) {
      hn::StoreU(hn::LoadU(d, from + i), d, to + i);
    }
    hn::StoreU(tail, d, to + last);
    from += kTileRows;
    to += kTileRows;
  }
}

// Keys and values of T; returns the bytes of a tile that they take.
template <typename T>
HWY_INLINE std::size_t move_elements(
    const RowMove& move, std::size_t key_dim, std::size_t value_dim) {
  const hn::CappedTag<T, 32> wide;
  const hn::CappedTag<T, 8> narrow;
  if (move.count >= hn::Lanes(wide)) {
    move_keys(move, key_dim, wide);
  } else if (move.count >= hn::Lanes(narrow)) {
    move_keys(move, key_dim, narrow);
  } else {
    move_keys(move, key_dim, hn::CappedTag<T, 1>());
  }
  const std::size_t values = key_dim * kTileRows;
  std::memmove(
      reinterpret_cast<T*>(move.to_tile) + values + move.to * value_dim,
      reinterpret_cast<const T*>(move.from_tile) + values +
          move.from * value_dim,
      move.count * value_dim * sizeof(T));
  return (key_dim + value_dim) * kTileRows * sizeof(T);
}

void move(const RowMove& move, std::size_t key_dim, std::size_t value_dim) {
  move_elements<std::uint16_t>(move, key_dim, value_dim);
}

void move_int8(
    const RowMove& move, std::size_t key_dim, std::size_t value_dim) {
  const std::size_t scales =
      move_elements<std::uint8_t>(move, key_dim, value_dim);
  const auto* from = reinterpret_cast<const float*>(
      reinterpret_cast<const std::uint8_t*>(move.from_tile) + scales);
  auto* to = reinterpret_cast<float*>(
      reinterpret_cast<std::uint8_t*>(move.to_tile) + scales);
  for (const std::size_t first : {std::size_t{0}, kTileRows}) {
    std::memmove(
        to + first + move.to,
        from + first + move.from,
        move.count * sizeof(float));
  }
}

}  // namespace qfilters::kernels::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace qfilters::kernels {

HWY_EXPORT(move);
HWY_EXPORT(move_int8);

void move_rows(
    const RowMove& task, std::size_t key_dim, std::size_t value_dim) noexcept {
  HWY_DYNAMIC_DISPATCH(move)(task, key_dim, value_dim);
}

void move_int8_rows(
    const RowMove& task, std::size_t key_dim, std::size_t value_dim) noexcept {
  HWY_DYNAMIC_DISPATCH(move_int8)(task, key_dim, value_dim);
}

}  // namespace qfilters::kernels

#endif  // HWY_ONCE
