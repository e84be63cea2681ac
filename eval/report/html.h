#pragma once

#include <string>
#include <string_view>

namespace qfilters::eval::report {

/// Text that means itself, between tags and in quoted attributes.
[[nodiscard]] std::string escape(std::string_view text);

/// "22.870".
[[nodiscard]] std::string fixed(double value, int digits);

/// "19.5 MiB", "1.3 GiB".
[[nodiscard]] std::string bytes_text(double bytes);

/// A section with a heading, or nothing around nothing. `lede` is HTML.
[[nodiscard]] std::string section(
    std::string_view title, std::string_view lede, std::string_view body);

/// A table cell as dark as `share` of 0..1 says.
[[nodiscard]] std::string heat_cell(double share, std::string_view inner);

/// CSS and the script of the page, without tags.
[[nodiscard]] std::string_view style();
[[nodiscard]] std::string_view script();

}  // namespace qfilters::eval::report
