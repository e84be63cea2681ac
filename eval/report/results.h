#pragma once

#include <cstddef>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace qfilters::eval::report {

using Json = nlohmann::ordered_json;

/// A value below `json` by its keys; null for none.
[[nodiscard]] const Json* find(
    const Json& json, std::initializer_list<std::string_view> keys);
/// A finite number there.
[[nodiscard]] std::optional<double> number(
    const Json& json, std::initializer_list<std::string_view> keys);
/// A string there, or nothing.
[[nodiscard]] std::string text(
    const Json& json, std::initializer_list<std::string_view> keys);

/// One run of a sweep.
struct Result {
  std::string policy;
  std::string budget;  ///< as asked for; empty: every row is kept
  const Json* run = nullptr;

  /// Policy and budget.
  [[nodiscard]] std::string name() const;
};

/// The runs of a task, in order of policy (`llama`, `full`, `auto`, then as
/// they were run) and budget; `sweep` must outlive them.
[[nodiscard]] std::vector<Result> results(
    const Json& sweep, std::string_view task);

/// The names of the tasks that have runs.
[[nodiscard]] std::vector<std::string> tasks(const Json& sweep);

/// Policies or budgets of all tasks, each once, in the order of results().
[[nodiscard]] std::vector<std::string> policies(const Json& sweep);
[[nodiscard]] std::vector<std::string> budgets(const Json& sweep);

/// A number that runs of a task have and that says how good they are.
struct Measure {
  std::string task;
  std::vector<std::string> keys;  ///< where it stands in a run
  std::string title;
  bool lower_is_better = false;
  int digits = 3;      ///< more are not shown and not compared
  bool share = false;  ///< from 0 to 1

  [[nodiscard]] std::optional<double> of(const Json& run) const;
  /// Whether `a` is better than `b` as far as is shown.
  [[nodiscard]] bool better(double a, double b) const;
};

/// The means of the tasks that the sweep has.
[[nodiscard]] std::vector<Measure> task_means(const Json& sweep);
/// The scores of the kinds of tasks that RULER has.
[[nodiscard]] std::vector<Measure> ruler_kinds(const Json& sweep);

/// The value of a run of a policy and budget; none without such a run.
[[nodiscard]] std::optional<double> value_of(
    const std::vector<Result>& results,
    const Measure& measure,
    std::string_view policy,
    std::string_view budget);

/// class and data-p of what belongs to a policy, for style and script.
[[nodiscard]] std::string marks(const Json& sweep, std::string_view policy);

/// "query-agnostic, streaming": what a task's numbers are.
[[nodiscard]] std::string label_of(const Json& sweep, std::string_view task);

}  // namespace qfilters::eval::report
