#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace qfilters::kernels {

/// 16-bit values as float32, which holds each exactly.
void widen(
    const std::uint16_t* from,
    std::size_t count,
    Half type,
    float* to) noexcept;

}  // namespace qfilters::kernels
