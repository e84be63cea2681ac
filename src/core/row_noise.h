#pragma once

#include <cstddef>
#include <cstdint>

namespace qfilters {

/// A number in [0, 1) for each position of a head, uniform over positions, from
/// (seed, layer, batch, head, position) and nothing else.
class RowNoise {
 public:
  RowNoise(
      std::uint64_t seed,
      std::size_t layer,
      std::size_t batch,
      std::size_t kv_head) noexcept
      : head_(mix(mix(mix(mix(seed) + layer) + batch) + kv_head)) {}

  [[nodiscard]] float operator()(std::uint64_t position) const noexcept {
    return static_cast<float>(mix(head_ + position) >> 40) * 0x1p-24F;
  }

 private:
  // splitmix64 (Steele, Lea and Flood, 2014): a bijective mixer.
  static std::uint64_t mix(std::uint64_t x) noexcept {
    x += 0x9E3779B97F4A7C15ULL;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
  }

  std::uint64_t head_;
};

}  // namespace qfilters
