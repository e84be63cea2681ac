#include "eval/report/html.h"

#include <algorithm>

#include <fmt/core.h>

namespace qfilters::eval::report {

std::string escape(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string fixed(double value, int digits) {
  std::string text = fmt::format("{:.{}f}", value, digits);
  // "-0.00" says no more than "0.00".
  if (text.find_first_not_of("-0.") == text.npos && text.front() == '-') {
    text.erase(0, 1);
  }
  return text;
}

std::string bytes_text(double bytes) {
  constexpr double kMebi = 1 << 20;
  constexpr double kGibi = 1 << 30;
  if (bytes >= kGibi) return fixed(bytes / kGibi, 2) + " GiB";
  return fixed(bytes / kMebi, 1) + " MiB";
}

std::string section(
    std::string_view title, std::string_view lede, std::string_view body) {
  if (body.empty()) return "";
  return fmt::format(
      "<section>\n<h2>{}</h2>\n<p>{}</p>\n{}</section>\n", title, lede, body);
}

std::string heat_cell(double share, std::string_view inner) {
  return fmt::format(
      "<td class=\"heat\" style=\"--a:{:.2f}\">{}</td>",
      std::clamp(share, 0.0, 1.0),
      inner);
}

}  // namespace qfilters::eval::report
