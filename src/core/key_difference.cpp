#include "qfilters/key_difference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "qfilters/error.h"
#include "qfilters/scoring.h"

namespace qfilters {

namespace {

// One float per slot of a tile. Every sum below adds to each slot apart, in
// order of dimensions or tiles: vectors of any width give the same bits.
struct Slots {
  float at[kBlockRows] = {};
};

float inverse_root(float sum) noexcept {
  return sum > 0 ? 1 / std::sqrt(sum) : 0.0F;
}

// Of the keys [dim][kBlockRows] of a tile.
Slots squares_of(const float* tile, std::size_t dim) {
  Slots squares;
  for (std::size_t d = 0; d < dim; ++d) {
    const float* const key = tile + d * kBlockRows;
    for (std::size_t r = 0; r < kBlockRows; ++r)
      squares.at[r] += key[r] * key[r];
  }
  return squares;
}

// What makes the keys of a tile unit vectors. Those that have no length become
// zeros, and `odd` gets their slots, counted from `first`.
Slots scales_of(
    float* tile,
    std::size_t dim,
    std::size_t first,
    std::vector<std::size_t>& odd) {
  Slots scales = squares_of(tile, dim);
  for (std::size_t r = 0; r < kBlockRows; ++r) {
    if (std::isfinite(scales.at[r])) continue;
    odd.push_back(first + r);
    for (std::size_t d = 0; d < dim; ++d)
      tile[d * kBlockRows + r] = 0;
    scales.at[r] = 0;
  }
  for (float& scale : scales.at)
    scale = inverse_root(scale);
  return scales;
}

// Adds a tile's unit keys to the sums of each dimension.
void add_units(
    const float* tile, const Slots& scales, std::vector<Slots>& sums) {
  for (std::size_t d = 0; d < sums.size(); ++d) {
    const float* const key = tile + d * kBlockRows;
    for (std::size_t r = 0; r < kBlockRows; ++r)
      sums[d].at[r] += key[r] * scales.at[r];
  }
}

// The sum over all rows, of length 1.
std::vector<float> anchor_of(std::vector<Slots>& sums) {
  std::vector<float> anchor;
  float squares = 0;
  for (Slots& sum : sums) {
    for (std::size_t half = kBlockRows / 2; half > 0; half /= 2) {
      for (std::size_t r = 0; r < half; ++r)
        sum.at[r] += sum.at[r + half];
    }
    anchor.push_back(sum.at[0]);
    squares += sum.at[0] * sum.at[0];
  }
  const float scale = inverse_root(squares);
  for (float& a : anchor)
    a *= scale;
  return anchor;
}

// Minus the cosine of each key of a tile with the anchor.
Slots scores_of(
    const float* tile, const Slots& scales, const std::vector<float>& anchor) {
  Slots scores;
  for (std::size_t d = 0; d < anchor.size(); ++d) {
    const float* const key = tile + d * kBlockRows;
    for (std::size_t r = 0; r < kBlockRows; ++r)
      scores.at[r] -= key[r] * anchor[d];
  }
  for (std::size_t r = 0; r < kBlockRows; ++r)
    scores.at[r] *= scales.at[r];
  return scores;
}

}  // namespace

void key_differences(
    const RowsView& rows, std::size_t group, std::span<float> out) {
  if (out.size() != rows.rows(group)) {
    throw Error(
        ErrorKind::kShape,
        "key differences: room for " + std::to_string(out.size()) +
            " values, not " + std::to_string(rows.rows(group)));
  }
  const std::size_t dim = rows.shape().key_dim;
  const std::size_t tile = dim * kBlockRows;
  thread_local std::vector<float> tiles;
  tiles.resize(key_tile_floats(rows, group));
  read_key_tiles(rows, group, tiles);
  std::vector<Slots> sums(dim);
  std::vector<Slots> scales;
  std::vector<std::size_t> odd;
  for (std::size_t at = 0; at < tiles.size(); at += tile) {
    scales.push_back(scales_of(tiles.data() + at, dim, at / dim, odd));
    add_units(tiles.data() + at, scales.back(), sums);
  }
  const std::vector<float> anchor = anchor_of(sums);
  for (std::size_t i = 0; i < scales.size(); ++i) {
    const Slots found = scores_of(tiles.data() + i * tile, scales[i], anchor);
    const std::size_t first = i * kBlockRows;
    std::copy_n(
        found.at, std::min(kBlockRows, out.size() - first), out.data() + first);
  }
  for (const std::size_t row : odd)
    out[row] = std::numeric_limits<float>::quiet_NaN();
}

}  // namespace qfilters
