#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "qfilters/attention.h"
#include "qfilters/policy.h"
#include "qfilters/sequence_cache.h"

#include "llama/capture.h"

namespace qfilters::eval {

/// The first tokens of a captured text as any policy keeps them, without the
/// model. Keys, values and queries are those of the full cache: a model that
/// reads from a bounded one has slightly others behind its first layer once
/// rows are gone, so that streaming() is what a policy would keep of these.
class Replay {
 public:
  /// `context` tokens from the beginning; the capture must outlive the object.
  /// `threads` never changes a result. Throws Error kInvalidArgument for no
  /// tokens or more than were captured.
  Replay(const llama::Capture& capture, std::size_t context, int threads = 1);

  /// The context in micro-batches of `chunk`, rows going after each. Throws
  /// Error kInvalidArgument without the queries of the whole context where the
  /// policy looks at attention, and what the cache throws. Then
  /// O(context * rows * dim) for each query head, else as commit().
  [[nodiscard]] std::unique_ptr<SequenceCache> streaming(
      const Policy& policy, std::size_t chunk, RowFormat format) const;

  /// The context as one micro-batch and one commit: with interval 0 exactly
  /// the budget stays. The policy sees attention as its source has it, over
  /// the whole prompt. Throws as streaming(), which needs more queries. For a
  /// policy that rehearses nothing goes in either: the second reading is the
  /// caller's (llama::Engine::evict()).
  [[nodiscard]] std::unique_ptr<SequenceCache> one_shot(
      const Policy& policy, RowFormat format);

  /// The scores, larger = keep, of all rows of a layer [kv head][token] when
  /// the context was read at once, rescored but not averaged over blocks; none
  /// for policy full and for windowed layers. Throws as one_shot(), and Error
  /// kInvalidArgument for a policy that rehearses.
  [[nodiscard]] std::vector<std::vector<float>> scores(
      const Policy& policy, std::size_t layer);

  /// A cache of `layer` alone that holds the first `tokens` of the text.
  [[nodiscard]] std::unique_ptr<SequenceCache> full_layer(
      std::size_t layer, std::size_t tokens) const;

  /// How attention is computed in a layer.
  [[nodiscard]] AttentionOptions attention(std::size_t layer) const;

  [[nodiscard]] const llama::Capture& capture() const noexcept {
    return capture_;
  }

  [[nodiscard]] std::size_t context() const noexcept { return context_; }

 private:
  [[nodiscard]] std::vector<LayerShape> shapes() const;
  [[nodiscard]] std::unique_ptr<SequenceCache> make_cache(
      const Policy& policy, RowFormat format) const;
  void append(SequenceCache& cache, std::size_t count) const;
  void check_queries(const Policy& policy, std::size_t from) const;
  [[nodiscard]] const AttentionStatistics& statistics(
      const AttentionNeeds& needs, std::size_t layer);

  const llama::Capture& capture_;
  std::size_t context_;
  int threads_;
  /// What was asked for once serves every policy that asks for it.
  std::vector<std::pair<AttentionNeeds, std::vector<AttentionStatistics>>>
      statistics_;
};

/// From which token of a context on the queries are needed so that `policy`
/// can be replayed: all of them for streaming() where it looks at attention,
/// those that its scorer counts for one_shot() and scores(); `context` for
/// none.
[[nodiscard]] std::size_t first_query_needed(
    const Policy& policy, std::size_t context, bool streaming);

}  // namespace qfilters::eval
