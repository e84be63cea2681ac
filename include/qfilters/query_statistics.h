#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "qfilters/calibrator.h"
#include "qfilters/filter_bank.h"
#include "qfilters/tensor_view.h"

namespace qfilters {

/// RoPE of a layer: at position p dimension d of a row x becomes
/// cos(angle[d] p) x[d] + sin(angle[d] p) x[partner[d]]. The two dimensions of
/// a pair are each other's partner, with opposite angles (radians a token); one
/// that does not turn has angle 0.
struct Rotation {
  std::vector<float> angle;
  std::vector<std::size_t> partner;
};

/// Rows [1, heads, tokens, dim], float32, as they were before `rotation` turned
/// them: token t is at position first_position + t. Dense, in the same order.
/// Throws Error kShape for other rows or a rotation of another dim.
/// O(heads * tokens * dim).
[[nodiscard]] std::vector<float> turn_back(
    const Rotation& rotation,
    const TensorView& rows,
    std::int32_t first_position);

/// Values a KV head has in a bank of QueryStatistics: the rotation's angles
/// [dim] and partners [dim], then for each of its query heads the mean [dim]
/// and the lower triangle of the covariance, row by row [dim * (dim + 1) / 2].
[[nodiscard]] constexpr std::size_t statistics_size(
    std::size_t dim, std::size_t query_heads) noexcept {
  return 2 * dim + query_heads * (dim + dim * (dim + 1) / 2);
}

/// Query heads of a KV head with `size` such values; 0 where that is no size.
[[nodiscard]] constexpr std::size_t statistics_heads(
    std::size_t dim, std::size_t size) noexcept {
  const std::size_t each = dim + dim * (dim + 1) / 2;
  return dim == 0 || size <= 2 * dim || (size - 2 * dim) % each != 0
             ? 0
             : (size - 2 * dim) / each;
}

/// A layer whose queries are described.
struct QueryLayer {
  QueryShape shape;
  Rotation rotation;
  float scale = 1;  ///< of attention: logit = scale * query . key
};

/// What the queries of each query head look like without their positions: mean
/// and covariance before RoPE, times the scale of attention, as Expected
/// Attention (arXiv:2510.00636) needs them. Sums in float64, in one pass.
class QueryStatistics {
 public:
  /// Throws Error kInvalidArgument as Calibrator, and for a rotation of another
  /// dim or with a partner that does not exist.
  explicit QueryStatistics(std::vector<QueryLayer> layers);

  /// Adds queries [1, query_heads, tokens, dim], float32, as attention
  /// multiplies them with keys: after RoPE. Throws as Calibrator::add(), and
  /// Error kShape for another batch; nothing is added then.
  /// O(heads * tokens * dim^2).
  void add(
      std::size_t layer,
      const TensorView& queries,
      std::int32_t first_position);

  /// [kv_heads, statistics_size()] per layer; zeros for a layer that has seen
  /// no query (windowed layers need no scores). Throws Error kInvalidArgument
  /// when all layers are such or one has seen a single row. metadata.n_samples
  /// is filled in: the fewest rows of a layer that has seen some.
  [[nodiscard]] FilterBank finish(FilterMetadata metadata) const;

 private:
  std::vector<QueryLayer> layers_;
  Calibrator moments_;
};

}  // namespace qfilters
