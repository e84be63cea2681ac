#pragma once

#include <cstddef>
#include <cstdint>

namespace qfilters::kernels {

/// How 16-bit rows are encoded.
enum class Half : std::uint8_t { kFloat16, kBFloat16 };

/// Rows of a tile: keys [dim][kTileRows], then values [kTileRows][value_dim].
inline constexpr std::size_t kTileRows = 64;

}  // namespace qfilters::kernels
