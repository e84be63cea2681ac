#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "policies/scorers.h"

namespace qfilters::policies {

namespace {

// One float per slot of a tile. Every sum below adds to each slot apart, in
// order of dimensions or tiles: vectors of any width give the same bits.
struct Slots {
  float at[kBlockRows] = {};
};

float inverse_root(float sum) noexcept {
  return sum > 0 ? 1 / std::sqrt(sum) : 0.0F;
}

// Makes the keys [dim][kBlockRows] of a tile unit vectors.
void normalise(float* tile, std::size_t dim) {
  Slots squares;
  for (std::size_t d = 0; d < dim; ++d) {
    for (std::size_t r = 0; r < kBlockRows; ++r)
      squares.at[r] += tile[d * kBlockRows + r] * tile[d * kBlockRows + r];
  }
  Slots scale;
  for (std::size_t r = 0; r < kBlockRows; ++r)
    scale.at[r] = inverse_root(squares.at[r]);
  for (std::size_t d = 0; d < dim; ++d) {
    for (std::size_t r = 0; r < kBlockRows; ++r)
      tile[d * kBlockRows + r] *= scale.at[r];
  }
}

// The sum over all rows for each dimension, of length 1.
std::vector<float> anchor_of(std::span<const float> tiles, std::size_t dim) {
  std::vector<Slots> sums(dim);
  for (std::size_t at = 0; at < tiles.size(); at += dim * kBlockRows) {
    for (std::size_t d = 0; d < dim; ++d) {
      const float* const key = tiles.data() + at + d * kBlockRows;
      for (std::size_t r = 0; r < kBlockRows; ++r)
        sums[d].at[r] += key[r];
    }
  }
  std::vector<float> anchor(dim);
  float squares = 0;
  for (std::size_t d = 0; d < dim; ++d) {
    float* const sum = sums[d].at;
    for (std::size_t half = kBlockRows / 2; half > 0; half /= 2) {
      for (std::size_t r = 0; r < half; ++r)
        sum[r] += sum[r + half];
    }
    anchor[d] = sum[0];
    squares += anchor[d] * anchor[d];
  }
  const float scale = inverse_root(squares);
  for (float& a : anchor)
    a *= scale;
  return anchor;
}

class KeyDiffScorer final : public Scorer {
 public:
  [[nodiscard]] std::string_view name() const noexcept override {
    return "keydiff";
  }

  void score(const ScoreInput& /*in*/, std::span<float> out) const override {
    std::fill(out.begin(), out.end(), 0.0F);
  }

  [[nodiscard]] bool frozen() const noexcept override { return false; }

  void rescore(const RescoreInput& in, std::span<float> scores) const override {
    const std::size_t dim = in.rows.shape().key_dim;
    const std::size_t group = in.batch * in.rows.shape().kv_heads + in.kv_head;
    thread_local std::vector<float> tiles;
    tiles.resize(key_tile_floats(in.rows, group));
    read_key_tiles(in.rows, group, tiles);
    for (std::size_t at = 0; at < tiles.size(); at += dim * kBlockRows)
      normalise(tiles.data() + at, dim);
    const std::vector<float> anchor = anchor_of(tiles, dim);
    for (std::size_t first = 0; first < scores.size(); first += kBlockRows) {
      Slots dots;
      for (std::size_t d = 0; d < dim; ++d) {
        const float* const key = tiles.data() + first * dim + d * kBlockRows;
        for (std::size_t r = 0; r < kBlockRows; ++r)
          dots.at[r] -= key[r] * anchor[d];
      }
      const std::size_t count = std::min(kBlockRows, scores.size() - first);
      std::copy_n(dots.at, count, scores.data() + first);
    }
  }
};

}  // namespace

std::shared_ptr<const Scorer> make_keydiff_scorer() {
  return std::make_shared<KeyDiffScorer>();
}

}  // namespace qfilters::policies
