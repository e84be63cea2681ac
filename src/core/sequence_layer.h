#pragma once

#include <cstdint>
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

  KVStore store;
  std::vector<EvictionQueue> queues;  // RowOrder::kSlot only
  // The open micro-batch.
  bool appended = false;
  TensorView keys;
  TensorView values;
  std::vector<float> scores;  // [groups, tokens]
  std::uint64_t non_finite = 0;
};

}  // namespace qfilters
