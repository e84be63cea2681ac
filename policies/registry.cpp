#include "policies/registry.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "qfilters/error.h"

#include "policies/scorers.h"

namespace qfilters::policies {

namespace {

constexpr std::array<PolicyInfo, 7> kPolicies = {{
    {"full", "every row stays"},
    {"auto", "ours, after arXiv:2505.23416 and arXiv:2601.07891", true},
    {"qfilters", "arXiv:2503.02812", true},
    {"streaming", "arXiv:2309.17453"},
    {"knorm", "arXiv:2406.11430"},
    {"random", "the baseline any policy must beat"},
    {"keydiff", "arXiv:2504.15364"},
}};

}  // namespace

std::span<const PolicyInfo> all() noexcept {
  return kPolicies;
}

const PolicyInfo* find(std::string_view name) noexcept {
  const auto* const found = std::find_if(
      kPolicies.begin(), kPolicies.end(), [&](const PolicyInfo& info) {
        return info.name == name;
      });
  return found == kPolicies.end() ? nullptr : found;
}

Policy make(
    std::string_view name,
    const PolicyOptions& options,
    std::shared_ptr<const FilterBank> filters) {
  if (find(name) == nullptr) {
    std::string known;
    for (const PolicyInfo& info : kPolicies)
      known += (known.empty() ? "" : ", ") + std::string(info.name);
    throw Error(
        ErrorKind::kInvalidArgument,
        "policy: unknown name '" + std::string(name) + "'; known: " + known);
  }
  if (name == "keydiff") return Policy::custom(make_keydiff_scorer(), options);
  return Policy::make(name, options, std::move(filters));
}

}  // namespace qfilters::policies
