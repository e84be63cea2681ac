#pragma once

#include <cstddef>
#include <cstdint>

namespace qfilters::kernels {

/// How 16-bit rows are encoded.
enum class Half : std::uint8_t { kFloat16, kBFloat16 };

/// Rows of a tile: keys [dim][kTileRows], then values [kTileRows][value_dim].
/// An int8 tile has a float32 scale for each key behind them, then one for each
/// value: a row is its int8 elements times its scale.
inline constexpr std::size_t kTileRows = 64;

}  // namespace qfilters::kernels
