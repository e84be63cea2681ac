#pragma once

#include <string>

#include "eval/report/results.h"

namespace qfilters::eval::report {

/// Every number of every run, a row for each policy and budget, sortable, with
/// the change against `full`.
[[nodiscard]] std::string numbers_table(const Json& sweep);

/// Scores of RULER by kind of task as a heat map.
[[nodiscard]] std::string ruler_table(const Json& sweep);

/// Tokens per second and what eviction takes, from the task that times best.
[[nodiscard]] std::string speed_table(const Json& sweep);

/// The task whose runs speed_table() shows.
[[nodiscard]] std::string timed_task(const Json& sweep);

}  // namespace qfilters::eval::report
