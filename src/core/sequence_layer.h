#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "qfilters/sequence_cache.h"

#include "core/eviction_queue.h"

namespace qfilters {

/// The part of a snapshot that SequenceCache::save() writes.
inline constexpr const char* kSequencePart = "sequence";

/// A layer's stored rows and what the open micro-batch brought for it.
struct SequenceCache::Layer {
  Layer(RowPool& pool, const RowShape& shape)
      : store(pool, shape), queues(shape.groups()) {}

  /// Scores of a group's stored and `tokens` new rows from this commit on.
  void copy_scores(
      std::size_t group, std::size_t tokens, std::vector<float>& out) const {
    if (observed) {
      out = observed_scores[group];
      return;
    }
    const auto stored = store.scores(group);
    const auto fresh = std::span(scores).subspan(group * tokens, tokens);
    out.assign(stored.begin(), stored.end());
    out.insert(out.end(), fresh.begin(), fresh.end());
  }

  KVStore store;
  std::vector<EvictionQueue> queues;  // RowOrder::kSlot only
  // The open micro-batch.
  bool appended = false;
  TensorView keys;
  TensorView values;
  std::vector<float> scores;  // [groups, tokens]
  bool observed = false;
  // By group, of stored and new rows: their scores from this commit on.
  std::vector<std::vector<float>> observed_scores;
  std::uint64_t non_finite = 0;
};

/// What one commit does to one group.
struct SequenceCache::GroupPlan {
  std::size_t layer = 0;
  std::size_t group = 0;
  std::size_t rows_after = 0;
  std::size_t drop_blocks = 0;  // windowed layers: whole blocks at the front
  std::size_t evicted = 0;
  bool in_place = false;  // the new row takes the slot of the one that goes
  bool chosen = false;    // `kept` says which rows stay, else all stored ones
  // Chosen only, of stored and new rows in temporal order.
  std::vector<std::uint32_t> order;  // stored rows by position, if not so
  std::vector<float> scores;
  std::vector<std::uint32_t> kept;      // in the end the stored ones alone
  std::vector<std::uint32_t> incoming;  // new rows that stay
  // With a merger: rows of the view that stay, and their values from now on.
  std::vector<std::uint32_t> merged;
  std::vector<std::uint16_t> merged_values;
};

/// Heads that share a budget.
struct SequenceCache::Sharing {
  std::vector<std::size_t> plans;
  std::size_t keep = 0;
  bool evicts = false;
};

}  // namespace qfilters
