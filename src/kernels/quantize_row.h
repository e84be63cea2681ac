#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace qfilters::kernels {

/// A 16-bit row as int8: out[i * stride] = row[i] / scale, rounded to nearest
/// even, in -127..127. Returns the scale, the largest |row[i]| / 127 in
/// float32: 0 for a row of zeros, NaN (and zeros in `out`) for a row with an
/// element that is not finite, so that the whole row reads as NaN. The same
/// bits on every instruction set.
float quantize_row(
    const std::uint16_t* row,
    std::size_t dim,
    Half type,
    std::int8_t* out,
    std::size_t stride) noexcept;

}  // namespace qfilters::kernels
