#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "qfilters/filter_bank.h"
#include "qfilters/policy.h"

namespace qfilters::policies {

/// A policy that can be asked for by name.
struct PolicyInfo {
  std::string_view name;
  std::string_view source;  ///< where the method comes from
  bool needs_filters = false;
};

/// All of them, in the order they are documented; the library's own first.
[[nodiscard]] std::span<const PolicyInfo> all() noexcept;

/// The entry of that name, null if there is none.
[[nodiscard]] const PolicyInfo* find(std::string_view name) noexcept;

/// By name. Throws Error kInvalidArgument as Policy::make().
[[nodiscard]] Policy make(
    std::string_view name,
    const PolicyOptions& options,
    std::shared_ptr<const FilterBank> filters = nullptr);

}  // namespace qfilters::policies
