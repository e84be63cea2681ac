#pragma once

#include <string>
#include <vector>

#include "output.h"

namespace qfilters::cli {

/// The runs of a task ("perplexity", say) as a table for people. With a
/// run of policy `llama` among several, the others show their ratio to it.
[[nodiscard]] std::string make_table(
    const std::string& task, const std::vector<Json>& runs);

}  // namespace qfilters::cli
