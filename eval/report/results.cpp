#include "eval/report/results.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <tuple>

#include <fmt/core.h>

#include "eval/report/html.h"

namespace qfilters::eval::report {

namespace {

const Json* step_into(const Json* json, std::string_view key) {
  if (json == nullptr || !json->is_object()) return nullptr;
  const auto found = json->find(std::string(key));
  return found == json->end() ? nullptr : &*found;
}

std::optional<double> finite(const Json* json) {
  if (json == nullptr || !json->is_number()) return std::nullopt;
  const auto value = json->get<double>();
  if (!std::isfinite(value)) return std::nullopt;
  return value;
}

void add_once(std::vector<std::string>& to, const std::string& word) {
  if (std::find(to.begin(), to.end(), word) == to.end()) to.push_back(word);
}

/// Budgets go by size: of rows first, then by their text.
std::pair<double, std::string> budget_key(const std::string& budget) {
  return {std::strtod(budget.c_str(), nullptr), budget};
}

int policy_rank(const std::string& policy) {
  if (policy == "llama") return 0;
  if (policy == "full") return 1;
  return policy == "auto" ? 2 : 3;
}

}  // namespace

const Json* find(
    const Json& json, std::initializer_list<std::string_view> keys) {
  const Json* at = &json;
  for (const std::string_view key : keys) {
    at = step_into(at, key);
  }
  return at;
}

std::optional<double> number(
    const Json& json, std::initializer_list<std::string_view> keys) {
  return finite(find(json, keys));
}

std::string text(
    const Json& json, std::initializer_list<std::string_view> keys) {
  const Json* const found = find(json, keys);
  return found != nullptr && found->is_string() ? found->get<std::string>()
                                                : "";
}

std::string Result::name() const {
  return budget.empty() ? policy : policy + " " + budget;
}

std::vector<Result> results(const Json& sweep, std::string_view task) {
  const Json* const runs = find(sweep, {"tasks", task, "runs"});
  std::vector<Result> out;
  if (runs == nullptr || !runs->is_array()) return out;
  std::vector<std::string> order;
  for (const Json& run : *runs) {
    const std::string policy = text(run, {"policy"});
    if (policy.empty()) continue;
    add_once(order, policy);
    std::string budget = text(run, {"budget_asked"});
    const std::optional<double> rows = number(run, {"budget"});
    if (budget.empty() && rows) budget = fixed(*rows, 0);
    out.push_back({policy, budget, &run});
  }
  const auto key = [&](const Result& result) {
    return std::tuple(
        policy_rank(result.policy),
        std::find(order.begin(), order.end(), result.policy) - order.begin(),
        budget_key(result.budget));
  };
  std::stable_sort(
      out.begin(), out.end(), [&](const Result& a, const Result& b) {
        return key(a) < key(b);
      });
  return out;
}

std::vector<std::string> tasks(const Json& sweep) {
  std::vector<std::string> names;
  const Json* const all = find(sweep, {"tasks"});
  if (all == nullptr || !all->is_object()) return names;
  for (const auto& [name, ignored] : all->items()) {
    if (!results(sweep, name).empty()) names.push_back(name);
  }
  return names;
}

std::vector<std::string> policies(const Json& sweep) {
  std::vector<std::string> names;
  for (const std::string& task : tasks(sweep)) {
    for (const Result& result : results(sweep, task)) {
      add_once(names, result.policy);
    }
  }
  std::stable_sort(
      names.begin(), names.end(), [](const auto& a, const auto& b) {
        return policy_rank(a) < policy_rank(b);
      });
  return names;
}

std::vector<std::string> budgets(const Json& sweep) {
  std::vector<std::string> names;
  for (const std::string& task : tasks(sweep)) {
    for (const Result& result : results(sweep, task)) {
      if (!result.budget.empty()) add_once(names, result.budget);
    }
  }
  std::sort(names.begin(), names.end(), [](const auto& a, const auto& b) {
    return budget_key(a) < budget_key(b);
  });
  return names;
}

std::optional<double> Measure::of(const Json& run) const {
  const Json* at = &run;
  for (const std::string& key : keys) {
    at = step_into(at, key);
  }
  return finite(at);
}

bool Measure::better(double a, double b) const {
  const double scale = std::pow(10, digits);
  const double x = std::round(a * scale);
  const double y = std::round(b * scale);
  return lower_is_better ? x < y : x > y;
}

namespace {

bool any_has(const Json& sweep, const Measure& measure) {
  const std::vector<Result> all = results(sweep, measure.task);
  return std::any_of(all.begin(), all.end(), [&](const Result& result) {
    return measure.of(*result.run).has_value();
  });
}

}  // namespace

std::vector<Measure> task_means(const Json& sweep) {
  const std::vector<Measure> known{
      {"perplexity", {"perplexity"}, "perplexity", true, 2},
      {"needle", {"accuracy"}, "needle: share found", false, 3, true},
      {"needle", {"mean_nll"}, "needle: loss of the answer", true},
      {"ruler", {"score"}, "RULER: score", false, 3, true},
      {"ruler", {"mean_nll"}, "RULER: loss of the answer", true},
      {"questions", {"score"}, "questions: score", false, 3, true},
      {"questions", {"fraction"}, "questions: answers given", false, 3, true},
      {"questions", {"mean_nll"}, "questions: loss of the answer", true},
      {"fidelity", {"mean_error"}, "fidelity: attention error", true, 4},
      {"fidelity",
       {"mean_rank_correlation"},
       "fidelity: rank correlation",
       false}};
  std::vector<Measure> out;
  for (const Measure& measure : known) {
    if (any_has(sweep, measure)) out.push_back(measure);
  }
  return out;
}

std::vector<Measure> ruler_kinds(const Json& sweep) {
  std::vector<std::string> kinds;
  for (const Result& result : results(sweep, "ruler")) {
    const Json* const tasks = find(*result.run, {"tasks"});
    if (tasks == nullptr || !tasks->is_object()) continue;
    for (const auto& [kind, ignored] : tasks->items()) {
      add_once(kinds, kind);
    }
  }
  std::vector<Measure> out;
  out.reserve(kinds.size());
  for (const std::string& kind : kinds) {
    out.push_back({"ruler", {"tasks", kind, "score"}, kind, false, 3, true});
  }
  return out;
}

std::optional<double> value_of(
    const std::vector<Result>& results,
    const Measure& measure,
    std::string_view policy,
    std::string_view budget) {
  for (const Result& result : results) {
    if (result.policy == policy && result.budget == budget) {
      return measure.of(*result.run);
    }
  }
  return std::nullopt;
}

std::string marks(const Json& sweep, std::string_view policy) {
  const std::vector<std::string> all = policies(sweep);
  return fmt::format(
      "class=\"series{}\" data-p=\"{}\"",
      policy == "auto" ? " auto" : "",
      std::find(all.begin(), all.end(), policy) - all.begin());
}

std::string label_of(const Json& sweep, std::string_view task) {
  bool agnostic = true;
  std::vector<std::string> protocols;
  for (const Result& result : results(sweep, task)) {
    const std::string query = text(*result.run, {"query"});
    agnostic = agnostic && (query.empty() || query == "agnostic");
    std::string protocol = text(*result.run, {"protocol"});
    if (protocol.empty()) protocol = text(sweep, {"settings", "protocol"});
    add_once(protocols, protocol.empty() ? "streaming" : protocol);
  }
  std::string label = agnostic ? "query-agnostic" : "some numbers query-aware";
  for (const std::string& protocol : protocols) {
    label += ", " + protocol;
  }
  return label;
}

}  // namespace qfilters::eval::report
