#include "eval/report/heat.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>

#include <fmt/core.h>

#include "eval/report/html.h"

namespace qfilters::eval::report {

namespace {

// Needles

struct Needles {
  std::size_t found = 0;
  std::size_t count = 0;
  double loss = 0;
};

std::string label_of_value(const Json* value) {
  if (value == nullptr) return "?";
  if (value->is_string()) return value->get<std::string>();
  return value->is_number() ? fmt::format("{:g}", value->get<double>())
                            : value->dump();
}

void add_once(std::vector<std::string>& to, const std::string& word) {
  if (std::find(to.begin(), to.end(), word) == to.end()) to.push_back(word);
}

/// Which key of a cell the rows of the maps go by.
std::string_view rows_by(const std::vector<Result>& all) {
  std::vector<std::string> lengths;
  for (const Result& result : all) {
    const Json* const cells = find(*result.run, {"cells"});
    if (cells == nullptr || !cells->is_array()) continue;
    for (const Json& cell : *cells) {
      add_once(lengths, label_of_value(find(cell, {"length"})));
    }
  }
  return lengths.size() > 1 ? "length" : "key";
}

std::string needle_map(const Json& cells, std::string_view by) {
  std::vector<std::string> rows;
  std::vector<std::string> depths;
  std::map<std::pair<std::string, std::string>, Needles> grid;
  for (const Json& cell : cells) {
    const auto loss = number(cell, {"nll_per_token"});
    if (!loss) continue;
    const std::string row = label_of_value(find(cell, {by}));
    const std::string depth = label_of_value(find(cell, {"depth"}));
    add_once(rows, row);
    add_once(depths, depth);
    Needles& needles = grid[{row, depth}];
    const Json* const hit = find(cell, {"hit"});
    needles.found += hit != nullptr && *hit == true ? 1 : 0;
    needles.loss += *loss;
    ++needles.count;
  }
  if (rows.empty()) return "";
  std::string out = fmt::format("<table><tr><th>{}</th>", by);
  for (const std::string& depth : depths) {
    out += "<th>" + escape(depth) + "</th>";
  }
  out += "</tr>\n";
  for (const std::string& row : rows) {
    out += "<tr><th>" + escape(row) + "</th>";
    for (const std::string& depth : depths) {
      const auto found = grid.find({row, depth});
      if (found == grid.end()) {
        out += "<td></td>";
        continue;
      }
      const Needles& needles = found->second;
      const double loss = needles.loss / static_cast<double>(needles.count);
      out += heat_cell(
          std::exp(-loss),
          fmt::format(
              "{}/{}<br><small>{}</small>",
              needles.found,
              needles.count,
              fixed(loss, loss < 10 ? 2 : 1)));
    }
    out += "</tr>\n";
  }
  return out + "</table>";
}

std::string figure(
    const Json& sweep,
    const Result& result,
    const std::string& note,
    const std::string& body) {
  return fmt::format(
      "<figure {}><figcaption><b>{}</b>{}{}</figcaption>{}</figure>\n",
      marks(sweep, result.policy),
      escape(result.name()),
      note.empty() ? "" : ": ",
      note,
      body);
}

std::string small_multiples(const std::string& figures) {
  return figures.empty() ? ""
                         : "<div class=\"small\">\n" + figures + "</div>\n";
}

// Layers by heads

using Grid = std::vector<std::vector<std::optional<double>>>;

Grid grid_of(const Json* json) {
  Grid grid;
  if (json == nullptr || !json->is_array()) return grid;
  for (const Json& layer : *json) {
    auto& heads = grid.emplace_back();
    if (!layer.is_array()) continue;
    for (const Json& head : layer) {
      const bool good = head.is_number() && std::isfinite(head.get<double>());
      heads.push_back(good ? std::optional(head.get<double>()) : std::nullopt);
    }
  }
  return grid;
}

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();

  [[nodiscard]] bool empty() const { return high < low; }
};

Range range_of(const Grid& grid) {
  Range range;
  for (const auto& layer : grid) {
    for (const std::optional<double>& value : layer) {
      if (!value) continue;
      range.low = std::min(range.low, *value);
      range.high = std::max(range.high, *value);
    }
  }
  return range;
}

/// Layers from left to right, heads from top to bottom; as dark as `shade` of
/// a value's size says, 0 to 1, in the colour of what is bad where `bad` says.
std::string layer_picture(
    const Grid& grid,
    int digits,
    const std::function<double(double)>& shade,
    const std::function<bool(double)>& bad) {
  std::size_t heads = 1;
  for (const auto& layer : grid) {
    heads = std::max(heads, layer.size());
  }
  constexpr double kWide = 240;
  const double step = kWide / static_cast<double>(grid.size());
  const double tall = std::clamp(64.0 / static_cast<double>(heads), 3.0, 12.0);
  std::string cells;
  for (std::size_t l = 0; l < grid.size(); ++l) {
    for (std::size_t h = 0; h < grid[l].size(); ++h) {
      if (!grid[l][h]) continue;
      const double value = *grid[l][h];
      const double share = shade(std::abs(value));
      cells += fmt::format(
          "<rect class=\"cell{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" "
          "height=\"{:.1f}\" fill-opacity=\"{:.2f}\"><title>layer {}, head "
          "{}: {}</title></rect>",
          bad(value) ? " off" : "",
          step * static_cast<double>(l),
          tall * static_cast<double>(h),
          step * 0.92,
          tall * 0.92,
          std::clamp(share, 0.0, 1.0),
          l,
          h,
          fixed(value, digits));
    }
  }
  const double height = tall * static_cast<double>(heads);
  return fmt::format(
      "<svg viewBox=\"-1 -1 {} {}\">{}<rect class=\"frame\" x=\"-.5\" "
      "y=\"-.5\" width=\"{}\" height=\"{}\"/></svg>\n",
      kWide + 2,
      height + 2,
      cells,
      kWide + 1,
      height + 1);
}

/// For each budget the rows that are drawn darkest: the most there are, but
/// three times the mean at most, or a single head would hide the others.
std::map<std::string, double> darkest_rows(const std::vector<Result>& all) {
  struct Sum {
    double rows = 0;
    double heads = 0;
    double most = 0;
  };

  std::map<std::string, Sum> sums;
  for (const Result& result : all) {
    for (const auto& layer : grid_of(find(*result.run, {"rows_by_head"}))) {
      Sum& sum = sums[result.budget];
      for (const std::optional<double>& rows : layer) {
        if (!rows) continue;
        sum.rows += *rows;
        sum.most = std::max(sum.most, *rows);
        ++sum.heads;
      }
    }
  }
  std::map<std::string, double> out;
  for (const auto& [budget, sum] : sums) {
    if (sum.most > 0) {
      out[budget] = std::min(sum.most, 3 * sum.rows / sum.heads);
    }
  }
  return out;
}

/// An error as a shade: 0.001 and less is white, 1 (all is lost) darkest.
double shade_of_error(double error) {
  return error > 0 ? 1 + std::log10(error) / 3 : 0;
}

}  // namespace

std::string needle_maps(const Json& sweep) {
  const std::vector<Result> all = results(sweep, "needle");
  const std::string_view by = rows_by(all);
  std::string figures;
  for (const Result& result : all) {
    const Json* const cells = find(*result.run, {"cells"});
    if (cells == nullptr || !cells->is_array()) continue;
    const std::string map = needle_map(*cells, by);
    if (map.empty()) continue;
    const auto share = number(*result.run, {"accuracy"});
    figures += figure(
        sweep, result, share ? fixed(*share * 100, 0) + " % found" : "", map);
  }
  return small_multiples(figures);
}

std::string mapped_task(const Json& sweep) {
  for (const std::string& task : tasks(sweep)) {
    for (const Result& result : results(sweep, task)) {
      if (!result.budget.empty() &&
          !range_of(grid_of(find(*result.run, {"rows_by_head"}))).empty()) {
        return task;
      }
    }
  }
  return "";
}

std::string row_maps(const Json& sweep) {
  const std::vector<Result> all = results(sweep, mapped_task(sweep));
  const std::map<std::string, double> most = darkest_rows(all);
  std::string figures;
  std::string uniform;
  std::string last;  // policy of the uniform ones
  for (const Result& result : all) {
    const Grid grid = grid_of(find(*result.run, {"rows_by_head"}));
    const Range range = range_of(grid);
    if (range.empty() || result.budget.empty()) continue;
    if (range.high == range.low) {
      const std::string rows = fixed(range.low, 0);
      uniform += last == result.policy
                     ? ", " + rows
                     : (last.empty() ? "" : "), ") + escape(result.policy) +
                           " (" + rows;
      last = result.policy;
      continue;
    }
    figures += figure(
        sweep,
        result,
        fmt::format("{} to {} rows", fixed(range.low, 0), fixed(range.high, 0)),
        layer_picture(
            grid,
            0,
            [&](double rows) { return rows / most.at(result.budget); },
            [](double) { return false; }));
  }
  std::string out = small_multiples(figures);
  if (!uniform.empty()) {
    out += "<p class=\"soft\">Every head held the same number of rows with " +
           uniform + ").</p>\n";
  }
  return out;
}

std::string fidelity_maps(const Json& sweep) {
  std::string errors;
  std::string ranks;
  const Json* shown = nullptr;  // scores need not depend on the budget
  for (const Result& result : results(sweep, "fidelity")) {
    if (result.budget.empty()) continue;
    const auto add = [&](std::string& to,
                         const Result& of,
                         const Json* values,
                         std::string_view mean_key,
                         int digits,
                         const auto& shade,
                         const auto& bad) {
      const Grid grid = grid_of(values);
      if (range_of(grid).empty()) return;
      const auto mean = number(*of.run, {mean_key});
      to += figure(
          sweep,
          of,
          mean ? "mean " + fixed(*mean, digits) : "",
          layer_picture(grid, digits, shade, bad));
    };
    add(errors,
        result,
        find(*result.run, {"fidelity", "error"}),
        "mean_error",
        4,
        shade_of_error,
        [](double) { return true; });
    const Json* const rank =
        find(*result.run, {"fidelity", "rank_correlation"});
    if (rank == nullptr || (shown != nullptr && *shown == *rank)) continue;
    shown = rank;
    add(
        ranks,
        result,
        rank,
        "mean_rank_correlation",
        3,
        [](double size) { return size; },
        [](double correlation) { return correlation < 0; });
  }
  std::string out;
  if (!errors.empty()) {
    out += "<h3>Error of the attention output</h3>\n" + small_multiples(errors);
  }
  if (!ranks.empty()) {
    out += "<h3>Rank correlation of scores with later attention</h3>\n" +
           small_multiples(ranks);
  }
  return out;
}

}  // namespace qfilters::eval::report
