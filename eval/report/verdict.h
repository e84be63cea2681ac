#pragma once

#include <optional>
#include <string>
#include <vector>

#include "eval/report/results.h"

namespace qfilters::eval::report {

/// The best policies of a measure at a budget, of those that are bounded and
/// did not see the question. More than one: they are equal as far as is shown.
struct Best {
  Measure measure;
  std::string budget;
  std::vector<std::string> policies;
  double value = 0;
  std::optional<double> of_auto;  ///< what policy auto has there
  bool alone = false;             ///< there is no other policy to compare with

  /// Whether others are better than auto, which is there.
  [[nodiscard]] bool auto_is_beaten() const {
    return of_auto && measure.better(value, *of_auto);
  }
};

/// Best policies by measure, then budget; a measure without runs at a budget is
/// left out.
[[nodiscard]] std::vector<Best> judge(
    const Json& sweep, const std::vector<Measure>& measures);

/// The verdict as HTML: first where auto is beaten, then the best of each.
[[nodiscard]] std::string verdict_html(const Json& sweep);

}  // namespace qfilters::eval::report
