#include "run_table.h"

#include <algorithm>
#include <functional>
#include <optional>

#include <fmt/core.h>

namespace qfilters::cli {

namespace {

struct Column {
  std::string title;
  std::function<std::string(const Json& run)> cell;
};

using Value = std::function<double(const Json& run)>;

double mebi(const Json& bytes) {
  return bytes.get<double>() / (1 << 20);
}

/// A number, and its ratio to the baseline's.
Column ratio_column(
    std::string title, int digits, const Value& value, const Json* baseline) {
  const auto cell = [=](const Json& run) {
    std::string text = fmt::format("{:.{}f}", value(run), digits);
    if (baseline == nullptr || value(*baseline) <= 0) return text;
    return text + fmt::format(" {:4.2f}x", value(run) / value(*baseline));
  };
  return {std::move(title), cell};
}

std::vector<Column> task_columns(
    const std::string& task, const Json* baseline) {
  if (task == "needle") {
    return {
        {"accuracy",
         [](const Json& run) {
           return fmt::format("{:.2f}", run["accuracy"].get<double>());
         }},
        {"nll/token", [](const Json& run) {
           return fmt::format("{:.3f}", run["mean_nll"].get<double>());
         }}};
  }
  return {
      ratio_column(
          "perplexity",
          3,
          [](const Json& run) { return run["perplexity"].get<double>(); },
          baseline),
      {"predictions", [](const Json& run) {
         return std::to_string(run["predictions"].get<std::size_t>());
       }}};
}

std::vector<Column> columns_of(const std::string& task, const Json* baseline) {
  std::vector<Column> columns{
      {"policy",
       [](const Json& run) { return run["policy"].get<std::string>(); }},
      {"budget", [](const Json& run) {
         const Json& rows = run["budget"];
         return rows.is_null() ? "-" : std::to_string(rows.get<std::size_t>());
       }}};
  for (Column& column : task_columns(task, baseline)) {
    columns.push_back(std::move(column));
  }
  const auto rate = [](const char* phase) {
    return [phase](const Json& run) {
      return run["tokens_per_second"][phase].get<double>();
    };
  };
  columns.push_back(
      ratio_column("prefill tok/s", 1, rate("prefill"), baseline));
  columns.push_back(ratio_column("decode tok/s", 1, rate("decode"), baseline));
  columns.push_back(ratio_column(
      "KV MiB",
      1,
      [](const Json& run) { return mebi(run["kv_bytes"]["peak"]); },
      baseline));
  columns.push_back(ratio_column(
      "peak memory MiB",
      0,
      [](const Json& run) { return mebi(run["peak_rss_bytes"]); },
      baseline));
  return columns;
}

/// The first column is text and starts at the left, numbers end at the right.
std::string make_row(
    const std::vector<std::string>& cells,
    const std::vector<std::size_t>& widths) {
  std::string row = fmt::format("{:<{}}", cells[0], widths[0]);
  for (std::size_t i = 1; i < cells.size(); ++i) {
    row += fmt::format("  {:>{}}", cells[i], widths[i]);
  }
  return row + "\n";
}

}  // namespace

std::string make_table(const std::string& task, const std::vector<Json>& runs) {
  const auto llama =
      std::find_if(runs.begin(), runs.end(), [](const Json& run) {
        return run["policy"] == "llama";
      });
  const bool compare = llama != runs.end() && runs.size() > 1;
  const std::vector<Column> columns =
      columns_of(task, compare ? &*llama : nullptr);

  std::vector<std::vector<std::string>> rows(runs.size() + 1);
  std::vector<std::size_t> widths;
  for (const Column& column : columns) {
    rows[0].push_back(column.title);
    std::size_t width = column.title.size();
    for (std::size_t i = 0; i < runs.size(); ++i) {
      rows[i + 1].push_back(column.cell(runs[i]));
      width = std::max(width, rows[i + 1].back().size());
    }
    widths.push_back(width);
  }
  std::string table;
  for (const std::vector<std::string>& row : rows) {
    table += make_row(row, widths);
  }
  if (compare) table += "(x: ratio to llama)\n";
  return table;
}

}  // namespace qfilters::cli
