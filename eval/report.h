#pragma once

#include <string>

#include <nlohmann/json_fwd.hpp>

namespace qfilters::eval {

/// One page of HTML about a sweep, complete in itself (no network): what is
/// best at each budget, quality against memory, every number, needles, RULER,
/// speed, rows by head, fidelity, what was run. `sweep` is what `eval sweep`
/// writes, {"settings": {...}, "tasks": {task: {"runs": [...]}}}; what is
/// missing in it, or is no number, is left out, and all text is escaped.
[[nodiscard]] std::string make_report(const nlohmann::ordered_json& sweep);

}  // namespace qfilters::eval
