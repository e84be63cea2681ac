#pragma once

#include <cstddef>
#include <cstdint>

namespace qfilters::kernels {

/// Moves `count` consecutive rows from slot `from` of one tile to slot `to` of
/// another or the same: keys [key_dim][kTileRows], then values
/// [kTileRows][value_dim]. In the same tile `to` must not exceed `from`.
struct RowMove {
  const std::uint16_t* from_tile;
  std::uint16_t* to_tile;
  std::size_t from;
  std::size_t to;
  std::size_t count;
};

void move_rows(
    const RowMove& move, std::size_t key_dim, std::size_t value_dim) noexcept;

/// The same from one int8 tile to another, both cast.
void move_int8_rows(
    const RowMove& move, std::size_t key_dim, std::size_t value_dim) noexcept;

}  // namespace qfilters::kernels
