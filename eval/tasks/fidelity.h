#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "qfilters/policy.h"
#include "qfilters/sequence_cache.h"

#include "eval/replay.h"
#include "eval/run.h"

namespace qfilters::eval {

struct FidelityOptions {
  std::size_t tokens = 2048;  ///< of the text: what policies keep a part of
  std::size_t later = 256;    ///< tokens that follow, whose queries are asked
};

/// How near attention over what a policy keeps comes to attention over
/// everything, each [layer][kv head].
struct FidelityResult {
  /// |difference| / |output|, norms over all later queries, the query heads of
  /// the group and the output's dimensions.
  std::vector<std::vector<double>> error;
  /// Of the policy's scores of all rows (Replay::scores()) with the attention
  /// that the later queries pay them, summed over queries and the query heads
  /// of the group; none where there are no scores (policy full, windowed
  /// layers) or where they are all the same.
  std::vector<std::vector<std::optional<double>>> rank_correlation;
  std::vector<std::vector<std::size_t>> rows;  ///< of the context, kept
  double mean_error = 0;  ///< over the heads of global layers
  std::optional<double> mean_rank_correlation;  ///< over those that have one
};

/// Throws Error kInvalidArgument unless both counts are 1 or more and the
/// positions suffice.
void check_fidelity_options(const FidelityOptions& options);

/// Attention of the captured tokens behind a context, the later ones, over all
/// of the context: what all policies are measured against. Each later query
/// sees the later rows up to its own besides. Holds the outputs of all layers,
/// query_heads * value_dim * 4 bytes a layer and later token.
class Fidelity {
 public:
  /// Throws Error kInvalidArgument when no later tokens or not all of their
  /// queries were captured. O(later * tokens * dim) a query head and layer.
  /// The replay must outlive the object.
  explicit Fidelity(Replay& replay);

  /// Of a cache that holds what `policy` keeps of the context; it comes back as
  /// it was. Throws Error kMismatch for a cache that has read anything else.
  [[nodiscard]] FidelityResult measure(
      const Policy& policy, SequenceCache& cache) const;

 private:
  [[nodiscard]] std::vector<float> attend_later(
      SequenceCache& cache,
      std::size_t cache_layer,
      std::size_t layer,
      AttentionStatistics* statistics) const;
  [[nodiscard]] double error_of(
      const std::vector<float>& out, std::size_t layer, std::size_t head) const;

  Replay& replay_;
  std::size_t later_;
  std::vector<std::vector<float>> out_;  // [layer][query head, later, dim]
  std::vector<std::vector<std::vector<float>>> future_;  // [layer][head][row]
};

}  // namespace qfilters::eval
