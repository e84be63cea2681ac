#pragma once

#include <span>
#include <string_view>

#include "qfilters/filter_file.h"

namespace qfilters::io {

/// "positive" or "negated", as files and the command line spell it.
[[nodiscard]] std::string_view sign_name(FilterSign sign);

/// The sign of that name. Throws Error kFile for any other.
[[nodiscard]] FilterSign parse_sign(std::string_view name);

/// Turns values as they lie in a file into values as they lie in memory, and
/// back.
void apply_sign(FilterSign sign, std::span<float> values);

}  // namespace qfilters::io
