#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "qfilters/scoring.h"

namespace qfilters::policies {

/// KeyDiff (arXiv:2504.15364): keys unlike the others stay. Score = -cos(key,
/// mean of the unit keys of the head's rows), over the rows at hand, whenever
/// rows are chosen. O(rows * dim).
[[nodiscard]] std::shared_ptr<const Scorer> make_keydiff_scorer();

/// Q-Filters without queries: the projection on key_direction() of the rows at
/// hand, as the fallback of QFiltersKVCache has it, found again whenever rows
/// are chosen. O(rows * dim^2 + dim^3). Throws Error kInvalidArgument unless
/// sign is +1 or -1.
[[nodiscard]] std::shared_ptr<const Scorer> make_keysvd_scorer(int sign = 1);

/// H2O (arXiv:2306.14048): all attention a row ever got, added up. `name` is
/// the scorer's: a literal.
[[nodiscard]] std::shared_ptr<const Scorer> make_h2o_scorer(
    std::string_view name = "h2o");

/// Rows are chosen as by `base`, which looks at no attention; what travels with
/// them is all attention they ever got, for a merger. `base` scores all rows
/// anew whenever rows are chosen, as score_rows() does: O(rows * dim) and what
/// it takes.
[[nodiscard]] std::shared_ptr<const Scorer> make_attended_scorer(
    std::shared_ptr<const Scorer> base);

/// TOVA (arXiv:2401.06104): the attention of the last query, the same for all
/// heads of a layer.
[[nodiscard]] std::shared_ptr<const Scorer> make_tova_scorer();

/// What KVzip (arXiv:2505.23416) keeps rows by: the largest attention a row
/// gets from any query of any second reading. It rehearses.
[[nodiscard]] std::shared_ptr<const Scorer> make_reconstruct_scorer();

/// What rows make of their neighbours' scores.
enum class Pooling {
  kMax,   ///< the largest
  kMean,  ///< the mean, of nothing beyond the rows' ends
};

struct SnapOptions {
  std::size_t window = 32;  ///< queries that count, the last of a micro-batch
  std::size_t kernel = 7;   ///< neighbouring rows that share scores; odd
  Pooling pooling = Pooling::kMax;
};

/// SnapKV (arXiv:2404.14469): the attention of the last `window` queries, which
/// rows before the window pool among `kernel` neighbours.
/// `name` is the scorer's: a literal. Throws Error kInvalidArgument for an
/// empty window or an even kernel.
[[nodiscard]] std::shared_ptr<const Scorer> make_snapkv_scorer(
    std::string_view name = "snapkv", const SnapOptions& options = {});

struct ExpectedOptions {
  std::size_t future = 512;  ///< positions to come, from the present one on
  std::size_t sinks = 4;     ///< first positions, left out of the softmax
  float epsilon = 0;         ///< what attention is taken to be at least
};

/// Expected Attention (arXiv:2510.00636): what a query to come pays a row on
/// average, if queries are normal with the mean m and covariance S of
/// QueryStatistics, turned as RoPE turns the next `future` positions on
/// average. Per query head softmax over rows of m . k + k^T S k / 2; their
/// mean, plus epsilon, times |v|. Rows at the first `sinks` positions get the
/// largest score. Found anew whenever rows are chosen, O(query heads * rows *
/// dim^2). `filters` are QueryStatistics'. Throws Error kInvalidArgument
/// without them, for no future or a negative epsilon.
[[nodiscard]] std::shared_ptr<const Scorer> make_expected_scorer(
    std::shared_ptr<const FilterBank> filters,
    const ExpectedOptions& options = {});

}  // namespace qfilters::policies
