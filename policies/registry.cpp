#include "policies/registry.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "qfilters/error.h"

#include "policies/scorers.h"

namespace qfilters::policies {

namespace {

constexpr std::size_t kWindow = SnapOptions{}.window;

constexpr std::size_t none(std::size_t /*budget*/, bool /*windows*/) {
  return 0;
}

constexpr std::size_t window(std::size_t /*budget*/, bool /*windows*/) {
  return kWindow;
}

constexpr std::size_t quarter(std::size_t budget, bool /*windows*/) {
  return budget / 4;
}

// Fluency wants about so many of the newest rows, whatever the budget, and few
// where other layers have them; facts want some rows, whatever the budget.
constexpr std::size_t fluent(std::size_t budget, bool windows) {
  constexpr std::size_t kFluency = 192;
  constexpr std::size_t kFacts = 32;
  if (windows) return budget / 8;
  const std::size_t half = budget / 2;
  return std::max(
      budget / 4, std::min(kFluency, half - std::min(half, kFacts)));
}

constexpr std::array<PolicyInfo, 17> kPolicies = {{
    {.name = "full", .source = "every row stays"},
    {.name = "auto",
     .source = "ours, after arXiv:2505.23416 and arXiv:2601.07891",
     .needs_filters = true,
     .recent = fluent,
     .rule = BudgetRule::kShared},
    {.name = "qfilters", .source = "arXiv:2503.02812", .needs_filters = true},
    {.name = "streaming", .source = "arXiv:2309.17453", .recent = none},
    {.name = "knorm", .source = "arXiv:2406.11430"},
    {.name = "random", .source = "the baseline any policy must beat"},
    {.name = "keydiff", .source = "arXiv:2504.15364"},
    {.name = "qfilters-keysvd",
     .source = "arXiv:2503.02812, keys instead of queries"},
    {.name = "expected",
     .source = "arXiv:2510.00636",
     .needs_filters = true,
     .recent = none},
    {.name = "h2o", .source = "arXiv:2306.14048"},
    {.name = "cam",
     .source = "PMLR 235:58840, on arXiv:2306.14048",
     .merger = "cam"},
    {.name = "tova", .source = "arXiv:2401.06104", .recent = none},
    {.name = "snapkv", .source = "arXiv:2404.14469", .recent = window},
    {.name = "pyramidkv",
     .source = "arXiv:2406.02069",
     .recent = window,
     .needs_layers = true},
    {.name = "squeeze",
     .source = "arXiv:2404.04793",
     .needs_filters = true,
     .recent = none,
     .needs_layers = true},
    {.name = "chunkkv",
     .source = "arXiv:2502.00299",
     .recent = window,
     .block = 10},
    {.name = "reconstruct",
     .source = "arXiv:2505.23416",
     .recent = quarter,
     .rule = BudgetRule::kShared},
}};

// Policies that find the budgets of layers themselves need the layers.
void check_spread(
    std::string_view name,
    const PolicyOptions& options,
    std::span<const LayerShape> layers) {
  if (!layers.empty() && options.layer_budgets.empty()) return;
  throw Error(
      ErrorKind::kInvalidArgument,
      "policy: " + std::string(name) +
          (layers.empty() ? " needs the layers of the model"
                          : " finds the budgets of the layers itself"));
}

Policy make_pyramid(PolicyOptions options, std::span<const LayerShape> layers) {
  check_spread("pyramidkv", options, layers);
  options.layer_budgets =
      pyramid_budgets(layers, options.budget, options.protection);
  return Policy::custom(make_snapkv_scorer("pyramidkv"), options);
}

Policy make_squeeze(
    PolicyOptions options,
    const FilterBank* filters,
    std::span<const LayerShape> layers) {
  check_spread("squeeze", options, layers);
  if (filters == nullptr) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "squeeze: no filters; make them with `qfilters calibrate`");
  }
  std::vector<float> similarities;
  for (std::size_t l = 0; l < filters->layers(); ++l) {
    if (filters->layer(l).dim == 1)
      similarities.push_back(filters->layer(l).values.front());
  }
  if (similarities.size() != layers.size()) {
    throw Error(
        ErrorKind::kMismatch,
        "squeeze: similarities of " + std::to_string(similarities.size()) +
            " layers in the filters, the model has " +
            std::to_string(layers.size()));
  }
  options.layer_budgets =
      squeeze_budgets(layers, similarities, options.budget, options.protection);
  return Policy::custom(make_streaming_scorer("squeeze"), options);
}

Policy make_unmerged(
    std::string_view name,
    const PolicyOptions& options,
    std::shared_ptr<const FilterBank> filters,
    std::span<const LayerShape> layers) {
  if (name == "keydiff") return Policy::custom(make_keydiff_scorer(), options);
  if (name == "qfilters-keysvd") {
    return Policy::custom(make_keysvd_scorer(options.sign), options);
  }
  if (name == "expected") {
    return Policy::custom(
        make_expected_scorer(
            std::move(filters), {.sinks = options.protection.sinks}),
        options);
  }
  if (name == "h2o") return Policy::custom(make_h2o_scorer(), options);
  if (name == "cam") return Policy::custom(make_h2o_scorer("cam"), options);
  if (name == "tova") return Policy::custom(make_tova_scorer(), options);
  if (name == "snapkv") return Policy::custom(make_snapkv_scorer(), options);
  if (name == "reconstruct")
    return Policy::custom(make_reconstruct_scorer(), options);
  if (name == "pyramidkv") return make_pyramid(options, layers);
  if (name == "squeeze") return make_squeeze(options, filters.get(), layers);
  if (name == "chunkkv") {
    // The chunks take the place of the kernel.
    return Policy::custom(
        make_snapkv_scorer("chunkkv", {.kernel = 1}), options);
  }
  return Policy::make(name, options, std::move(filters));
}

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
    std::shared_ptr<const FilterBank> filters,
    std::span<const LayerShape> layers) {
  if (find(name) == nullptr) {
    std::string known;
    for (const PolicyInfo& info : kPolicies)
      known += (known.empty() ? "" : ", ") + std::string(info.name);
    throw Error(
        ErrorKind::kInvalidArgument,
        "policy: unknown name '" + std::string(name) + "'; known: " + known);
  }
  PolicyOptions unmerged = options;
  unmerged.merger = nullptr;
  Policy policy = make_unmerged(name, unmerged, std::move(filters), layers);
  if (options.merger == nullptr || !policy.bounded()) return policy;
  PolicyOptions merged = policy.options();
  merged.merger = options.merger;
  const bool attends = policy.scorer()->attention().has_value();
  return Policy::custom(
      attends || !options.merger->attention()
          ? policy.scorer()
          : make_attended_scorer(policy.scorer()),
      merged);
}

std::shared_ptr<const Merger> make_merger(
    std::string_view name, std::uint64_t seed) {
  if (name == "none") return nullptr;
  if (name == "cam") return make_cam_merger({.seed = seed});
  throw Error(
      ErrorKind::kInvalidArgument,
      "merge: '" + std::string(name) + "' is not one of none, cam");
}

std::vector<std::size_t> pyramid_budgets(
    std::span<const LayerShape> layers,
    std::size_t budget,
    const Protection& protection) {
  const auto [sinks, recent] = protection;
  if (sinks >= budget || recent >= budget - sinks) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "pyramid budgets: sinks (" + std::to_string(sinks) + ") + recent (" +
            std::to_string(recent) + ") must be below the budget (" +
            std::to_string(budget) + ")");
  }
  const auto is_global = [](const LayerShape& l) { return l.window == 0; };
  const auto count = static_cast<std::size_t>(
      std::count_if(layers.begin(), layers.end(), is_global));
  const std::size_t least = sinks + recent + 1;
  const auto mean = static_cast<double>(budget - least);
  constexpr double kLast = 1.0 / 20;
  std::vector<std::size_t> budgets(layers.size(), budget);
  // Rounded as sums, so that they add up.
  double sum = 0;
  std::size_t given = 0;
  std::size_t place = 0;
  for (std::size_t l = 0; l < layers.size() && count > 1; ++l) {
    if (!is_global(layers[l])) continue;
    const double fallen =
        static_cast<double>(place++) / static_cast<double>(count - 1);
    sum += mean * (2 - kLast - fallen * (2 - 2 * kLast));
    const auto until = static_cast<std::size_t>(std::llround(sum));
    budgets[l] = least + until - given;
    given = until;
  }
  return budgets;
}

}  // namespace qfilters::policies
