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
  std::vector<std::uint16_t> keys;  // the new rows of the open update
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
  /// Copies an update's rows in the storage type.
  void stage(const TensorView& keys_in, const TensorView& values_in);
  /// The fallback's one decision: filters from all rows seen so far, the
  /// staged ones included.
  void freeze_if_due(std::size_t tokens);
  /// Opens the update with the staged rows of these views.
  void open(const TensorView& keys_in, const TensorView& values_in);
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
