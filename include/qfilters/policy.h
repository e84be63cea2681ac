#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "qfilters/scoring.h"
#include "qfilters/selection.h"

namespace qfilters {

/// What a policy keeps. Rows are counted per KV head (uniform budget rule:
/// every head of every global layer keeps the same number).
struct PolicyOptions {
  std::size_t budget = 512;  ///< rows kept, sinks and recent rows included
  Protection protection;
  /// Evict only once a head holds budget + interval rows, down to budget.
  /// 0 evicts at every commit that exceeds the budget.
  std::size_t interval = 0;
  int sign = 1;            ///< qfilters only: +1 as published, -1 inverted
  std::uint64_t seed = 0;  ///< random only
};

/// An immutable value: a scorer, a budget and what is protected.
class Policy {
 public:
  /// Keeps every row.
  static Policy full();

  /// By name: full, qfilters, streaming, knorm, random. `filters` is needed by
  /// qfilters only. Throws Error kInvalidArgument for an unknown name, for
  /// sinks + recent >= budget, or when qfilters has no filters.
  static Policy make(
      std::string_view name,
      const PolicyOptions& options,
      std::shared_ptr<const FilterBank> filters = nullptr);

  /// With a scorer of one's own; name() is the scorer's. Throws as make().
  static Policy custom(
      std::shared_ptr<const Scorer> scorer, const PolicyOptions& options);

  /// The names make() knows, in the order they are documented.
  static std::span<const std::string_view> names() noexcept;

  [[nodiscard]] std::string_view name() const noexcept { return name_; }

  [[nodiscard]] bool bounded() const noexcept { return scorer_ != nullptr; }

  [[nodiscard]] const Scorer* scorer() const noexcept { return scorer_.get(); }

  [[nodiscard]] const PolicyOptions& options() const noexcept {
    return options_;
  }

  /// Rows a head that holds `rows` keeps at a commit (the eviction rule).
  [[nodiscard]] std::size_t rows_after_commit(std::size_t rows) const noexcept {
    const bool over = bounded() && rows > options_.budget &&
                      rows - options_.budget >= options_.interval;
    return over ? options_.budget : rows;
  }

 private:
  Policy() = default;

  std::string_view name_;
  std::shared_ptr<const Scorer> scorer_;
  PolicyOptions options_;
};

}  // namespace qfilters
