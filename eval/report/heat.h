#pragma once

#include <string>

#include "eval/report/results.h"

namespace qfilters::eval::report {

/// A small heat map of the needles for each policy and budget: by length and
/// depth, or by key and depth where there is one length. Each cell has the
/// needles found and the mean loss; its colour is as strong as the answer was likely.
[[nodiscard]] std::string needle_maps(const Json& sweep);

/// The rows that each head of each layer held at the end, a picture for each
/// policy and budget whose heads differ, and a sentence for the others.
[[nodiscard]] std::string row_maps(const Json& sweep);

/// The task whose runs row_maps() shows.
[[nodiscard]] std::string mapped_task(const Json& sweep);

/// Error of the attention output, and how well scores predict attention, by
/// layer and head.
[[nodiscard]] std::string fidelity_maps(const Json& sweep);

}  // namespace qfilters::eval::report
