#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace qfilters::kernels {

/// Row-major 16-bit rows of one head; `stride` in elements.
struct HalfRows {
  const std::uint16_t* data;
  std::ptrdiff_t stride;
  std::size_t rows;
  std::size_t dim;
  Half type;
};

/// out[i] = sign * (row i . filter) in the canonical order: 16 partial sums,
/// multiply then add, pairwise by halves.
void project_rows(
    const HalfRows& rows, const float* filter, float sign, float* out) noexcept;

/// out[i] = row i . row i in the same order.
void square_rows(const HalfRows& rows, float* out) noexcept;

/// out[i] = sum of (linear + square * k) * k over the dimensions k of row i,
/// each operation rounded, in the same order.
void quadratic_rows(
    const HalfRows& rows,
    const float* linear,
    const float* square,
    float* out) noexcept;

}  // namespace qfilters::kernels
