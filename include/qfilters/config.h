#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace qfilters {

/// Options of a QFiltersKVCache, with the names, defaults and checks of the
/// reference system's KVCacheConfig.
struct Config {
  /// Rows kept per KV head, sinks and recent rows included.
  std::int64_t qfilters_budget = 512;
  /// Leading rows that are never evicted.
  std::int64_t qfilters_n_sink = 4;
  /// Trailing rows that are never evicted (an extension of the method).
  std::int64_t qfilters_recent = 0;
  /// Key-SVD fallback only: tokens observed before the direction is frozen.
  std::int64_t qfilters_calib_tokens = 128;
  /// +1: the published direction; -1: inverted.
  std::int64_t qfilters_sign = 1;
  /// Floor of rows kept / tokens seen in (0, 1]; none disables the check.
  std::optional<double> qfilters_min_retention = 0.9;
  /// At the first crossing of the floor: "warn", "raise" or "ignore".
  std::string qfilters_on_low_retention = "warn";
  /// Accepted for compatibility: true is an error, there is no Metal here.
  std::optional<bool> use_metal_kernels = std::nullopt;
  /// Extension: evict only once budget + interval rows are held. 0: at every
  /// update that exceeds the budget.
  std::int64_t qfilters_interval = 0;
};

/// Throws Error kInvalidArgument with the field's name and value, in the
/// reference system's order of checks; kUnsupported for Metal.
void validate(const Config& config);

}  // namespace qfilters
