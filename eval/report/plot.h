#pragma once

#include <string>

#include "eval/report/results.h"

namespace qfilters::eval::report {

/// Quality against the peak of KV bytes as SVG: a line for each bounded policy
/// over its budgets, `full` and `llama` as dashed lines across. Empty without
/// a bounded run that has both. Losses far above the others are drawn at the
/// edge.
[[nodiscard]] std::string quality_plot(
    const Json& sweep, const Measure& measure);

/// How far apart labels must be moved so that none covers another: positions
/// ascending in the order of `wanted`, `gap` apart, within low..high where
/// there is room.
[[nodiscard]] std::vector<double> spread(
    std::vector<double> wanted, double gap, double low, double high);

}  // namespace qfilters::eval::report
