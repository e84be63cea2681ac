#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "qfilters/filter_bank.h"
#include "qfilters/tensor_view.h"

namespace qfilters {

/// Keys of one layer as a regression sees them.
struct KeyShape {
  std::size_t kv_heads = 0;
  std::size_t dim = 0;

  friend bool operator==(const KeyShape&, const KeyShape&) = default;
};

/// Coefficients of one head's quadratic score: linear and square terms of each
/// dimension, then those of the norm and of 1.
[[nodiscard]] constexpr std::size_t quadratic_size(std::size_t dim) noexcept {
  return 2 * dim + 2;
}

/// Fits, per KV head, quadratic scores (score_quadratic(), scoring.h) to what
/// keys turned out to be worth, one for each way of judging them: least squares
/// with a ridge on coefficients of standardised terms, in closed form from sums
/// in float64. Memory does not grow with the number of keys:
/// O(kv_heads * dim^2) a layer.
class KeyRegression {
 public:
  /// `scores` for each key. Throws Error kInvalidArgument for no layers or
  /// scores, a size of zero or beyond limits.h.
  explicit KeyRegression(
      const std::vector<KeyShape>& layers, std::size_t scores = 1);

  /// Adds keys [tokens, dim], float32, of one KV head and what each is worth,
  /// [scores, tokens]. Throws Error kShape for another number of values,
  /// kInvalidArgument for a layer or head that does not exist or a non-finite
  /// value; nothing is added then. O(tokens * dim^2).
  void add(
      std::size_t layer,
      std::size_t kv_head,
      std::span<const float> keys,
      std::span<const float> worth);

  /// [kv_heads, scores * quadratic_size(dim)] per layer, the coefficients of
  /// one score behind those of another; zeros for a layer that has seen no key
  /// at all (windowed layers need no scores). `ridge` is relative to the
  /// variance of a term. Throws Error kInvalidArgument when all layers are such
  /// or a head has seen fewer than two keys, and for a ridge that is not
  /// positive. metadata.n_samples is filled in. O(kv_heads * dim^3) a layer.
  [[nodiscard]] FilterBank finish(
      FilterMetadata metadata, double ridge = 1e-3) const;

 private:
  struct Head {
    std::vector<double> second;      // [terms, terms], lower triangle
    std::vector<double> with_worth;  // [scores, terms]
    std::uint64_t keys = 0;
  };

  struct Layer {
    KeyShape shape;
    std::vector<Head> heads;
  };

  std::size_t scores_;
  std::vector<Layer> layers_;
};

}  // namespace qfilters
