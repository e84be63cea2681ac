#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "qfilters/filter_bank.h"
#include "qfilters/tensor_view.h"

namespace qfilters {

/// Heads of one layer as calibration sees them.
struct QueryShape {
  std::size_t query_heads = 0;
  std::size_t kv_heads = 0;  ///< divides query_heads
  std::size_t dim = 0;

  friend bool operator==(const QueryShape&, const QueryShape&) = default;
};

/// Mean and spread of the queries of one query head.
struct QuerySpread {
  std::vector<double> mean;        ///< [dim]
  std::vector<double> covariance;  ///< lower triangle, row by row
};

/// Finds Q-Filters (arXiv:2503.02812, section 3.2) in one pass: it adds up the
/// second moment Q^T Q and the sum of all queries of each query head in
/// float64. The top eigenvector of Q^T Q is the first right singular vector of
/// Q; its sign is chosen so that v . sum(q) >= 0. Memory does not grow with
/// the number of queries, and two calibrators can be merged.
class Calibrator {
 public:
  /// Throws Error kInvalidArgument for no layers, a size of zero or beyond
  /// limits.h, or query heads that are no multiple of the KV heads.
  explicit Calibrator(const std::vector<QueryShape>& layers);

  /// Adds queries [batch, query_heads, tokens, dim], float32, as attention
  /// multiplies them with keys. Throws Error kShape on another shape or type,
  /// kInvalidArgument on a non-finite value; nothing is added then.
  /// O(heads * tokens * dim^2).
  void add(std::size_t layer, const TensorView& queries);

  /// Adds what another calibrator has seen. Throws Error kShape unless both
  /// have the same layers; nothing is added then.
  void merge(const Calibrator& other);

  /// Query rows per head that layer `layer` has seen.
  [[nodiscard]] std::uint64_t rows(std::size_t layer) const;

  /// Mean and covariance (divided by rows()) of a query head's queries. Throws
  /// Error kInvalidArgument for a layer or head that does not exist or a layer
  /// that has seen no row. O(dim^2).
  [[nodiscard]] QuerySpread spread(
      std::size_t layer, std::size_t query_head) const;

  /// One unit vector per KV head: the mean of its group's query filters,
  /// normalised (zero where these cancel exactly; e_0 for queries that are all
  /// zero). The same calls give the same bytes; other cuts of the same queries
  /// change no more than rounding. Throws Error kInvalidArgument when a layer
  /// has seen fewer than two rows. metadata.n_samples is filled in.
  [[nodiscard]] FilterBank finish(FilterMetadata metadata) const;

 private:
  struct Moments {
    std::vector<double> second;  // [dim, dim], lower triangle
    std::vector<double> sum;     // [dim]
  };

  struct Layer {
    QueryShape shape;
    std::vector<Moments> heads;
    std::uint64_t rows = 0;
  };

  std::vector<Layer> layers_;
};

/// The reference system's compute_qfilters: one unit vector per head for
/// queries [1, heads, tokens, dim] of any dtype, as Calibrator finds it. Of
/// more than `max_svd_samples` tokens it takes that many, evenly spaced from
/// the first to the last, the same ones for each head; Calibrator takes all.
/// All-zero queries give e_0, no heads give no filters. Throws Error kShape
/// unless batch is 1, dim is not 0 and sizes are within limits.h; then
/// kInvalidArgument for fewer than two tokens, for max_svd_samples below 2, and
/// for a non-finite query it takes. O(heads * (samples * dim^2 + dim^3)).
[[nodiscard]] LayerFilters compute_qfilters(
    const TensorView& queries, std::size_t max_svd_samples = 3000);

/// The mean filter of each KV head's group of consecutive query heads,
/// normalised (zero where a group cancels exactly): [kv_heads, dim] from
/// [query_heads, dim]. Throws Error kShape unless the values are heads * dim,
/// then kInvalidArgument unless kv_heads is positive and divides the heads.
[[nodiscard]] LayerFilters average_gqa_filters(
    const LayerFilters& query_filters, std::size_t kv_heads);

}  // namespace qfilters
