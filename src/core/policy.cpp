#include "qfilters/policy.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "qfilters/auto_scorer.h"
#include "qfilters/error.h"
#include "qfilters/limits.h"

namespace qfilters {

namespace {

constexpr std::array<std::string_view, 6> kNames = {
    "full", "auto", "qfilters", "streaming", "knorm", "random"};

void check_budget(std::size_t budget, const Protection& protection) {
  // Written so that huge values cannot wrap around.
  if (protection.sinks < budget &&
      protection.recent < budget - protection.sinks) {
    return;
  }
  throw Error(
      ErrorKind::kInvalidArgument,
      "policy: sinks (" + std::to_string(protection.sinks) + ") + recent (" +
          std::to_string(protection.recent) + ") must be below the budget (" +
          std::to_string(budget) + "), or nothing can be evicted");
}

}  // namespace

const char* to_string(BudgetRule rule) noexcept {
  if (rule == BudgetRule::kUniform) return "uniform";
  return rule == BudgetRule::kPerLayer ? "per-layer" : "shared";
}

Policy Policy::full() {
  Policy policy;
  policy.name_ = kNames[0];
  return policy;
}

Policy Policy::make(
    std::string_view name,
    const PolicyOptions& options,
    std::shared_ptr<const FilterBank> filters) {
  const auto* const known = std::find(kNames.begin(), kNames.end(), name);
  if (known == kNames.end()) {
    std::string list;
    for (const std::string_view each : kNames) {
      list += (list.empty() ? "" : ", ") + std::string(each);
    }
    throw Error(
        ErrorKind::kInvalidArgument,
        "policy: unknown name '" + std::string(name) + "'; known: " + list);
  }
  if (*known == "full") return full();
  if (*known == "auto") {
    return custom(make_auto_scorer(std::move(filters)), options);
  }
  if (*known == "qfilters") {
    return custom(
        make_qfilters_scorer(std::move(filters), options.sign), options);
  }
  if (*known == "streaming") return custom(make_streaming_scorer(), options);
  if (*known == "knorm") return custom(make_knorm_scorer(), options);
  return custom(make_random_scorer(options.seed), options);
}

Policy Policy::custom(
    std::shared_ptr<const Scorer> scorer, const PolicyOptions& options) {
  if (scorer == nullptr) {
    throw Error(ErrorKind::kInvalidArgument, "policy: no scorer");
  }
  check_budget(options.budget, options.protection);
  for (const std::size_t budget : options.layer_budgets)
    check_budget(budget, options.protection);
  if (options.rule == BudgetRule::kShared && !options.layer_budgets.empty()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "policy: layers that share one budget have none of their own");
  }
  if (!is_size(options.block) || !(options.floor >= 0 && options.floor <= 1)) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "policy: block=" + std::to_string(options.block) +
            " floor=" + std::to_string(options.floor) + ": a block of 1.." +
            std::to_string(kMostSize) + " rows and a floor in 0..1 are needed");
  }
  const Merger* const merger = options.merger.get();
  if (merger != nullptr && merger->attention() && !scorer->attention()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "policy: merger " + std::string(merger->name()) +
            " weighs by attention, which " + std::string(scorer->name()) +
            " does not look at");
  }
  Policy policy;
  policy.name_ = scorer->name();
  policy.scorer_ = std::move(scorer);
  policy.options_ = options;
  return policy;
}

std::span<const std::string_view> Policy::names() noexcept {
  return kNames;
}

}  // namespace qfilters
