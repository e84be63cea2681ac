#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "qfilters/kv_cache.h"

namespace qfilters {

class ByteReader;

PolicyOptions policy_options(const Config& config);

/// What a QFiltersKVCache is made of.
struct QFiltersKVCache::State {
  explicit State(const Config& c) : config(c) {}

  Config config;
  Policy policy = Policy::full();  // until there are filters
  // Calibrated: [heads, dim]. Fallback: one head per group once it is frozen.
  std::optional<LayerFilters> filters;
  bool calibrated = false;
  std::function<void(std::string_view)> warn;

  // Made by the first update, which decides shapes and dtype.
  std::unique_ptr<SequenceCache> sequence;
  // The new rows of the open update, unless they are borrowed.
  std::vector<std::uint16_t> keys;
  std::vector<std::uint16_t> values;
  std::uint64_t full_bytes = 0;
  std::uint64_t seen = 0;
  std::size_t offset = 0;
  bool retention_fired = false;

  [[nodiscard]] std::size_t groups() const;
  /// Rows a group holds once the open update is settled.
  [[nodiscard]] std::size_t rows_kept() const;
  void check(const TensorView& keys_in, const TensorView& values_in) const;
  void settle();
  /// Makes the sequence that the first update asks for.
  void start(const TensorView& keys_in, const TensorView& values_in);
  /// An update's rows in the storage type: where they are, if that is allowed
  /// and they are of that type, else a copy in `memory`.
  TensorView stage(
      const TensorView& rows,
      Inputs inputs,
      std::vector<std::uint16_t>& memory) const;
  /// The fallback's one decision: filters from all rows seen so far, the
  /// staged ones included.
  void freeze_if_due(const TensorView& new_keys);
  /// After a failed update: as if no sequence had been made or no filters
  /// frozen, where there were none before.
  void undo(bool fresh, bool unfrozen) noexcept;
  /// Starts to evict by these filters, one per (batch, head).
  void freeze(LayerFilters found);
  /// Makes the sequence, and the fallback's filters, that save() described;
  /// its rows take `row_bytes`.
  void start_restored(ByteReader& in, std::size_t row_bytes);
  /// Throws Error kFile unless updates could have left this state.
  void check_restored() const;
  /// Fires at most once; the update is complete by then.
  void check_retention();
};

}  // namespace qfilters
