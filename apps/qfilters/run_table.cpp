#include "run_table.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

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
  const auto number = [](std::string title, const char* key, int digits) {
    return Column{std::move(title), [=](const Json& run) {
                    return fmt::format(
                        "{:.{}f}", run[key].get<double>(), digits);
                  }};
  };
  const Column loss = number("nll/token", "mean_nll", 3);
  if (task == "needle") return {number("accuracy", "accuracy", 2), loss};
  if (task == "ruler") return {number("score", "score", 3), loss};
  if (task == "questions") {
    return {
        number("score", "score", 3), number("fraction", "fraction", 3), loss};
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
       [](const Json& run) {
         const std::string policy = run["policy"];
         const std::string merge = run.value("merge", "none");
         return merge == "none" || merge == policy ? policy
                                                   : policy + " +" + merge;
       }},
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
      [](const Json& run) {
        const Json& bytes = run["kv_bytes"];
        return mebi(bytes.value("compressed", bytes["peak"]));
      },
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

/// Rows of cells under a row of titles, in columns.
std::string layout(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths(rows.front().size(), 0);
  for (const std::vector<std::string>& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i)
      widths[i] = std::max(widths[i], row[i].size());
  }
  std::string table;
  for (const std::vector<std::string>& row : rows)
    table += make_row(row, widths);
  return table;
}

std::string label_of(const Json& run) {
  std::string label = run["policy"].get<std::string>();
  if (!run["budget"].is_null()) {
    label += fmt::format(" {}", run["budget"].get<std::size_t>());
  }
  if (run.contains("llama")) {
    const Json& llama = run["llama"];
    label += llama["flash_attention"].get<bool>() ? ", flash, " : ", ";
    label += llama["cache_type"].get<std::string>();
  } else if (run["cache_type"] != "f16") {
    label += ", " + run["cache_type"].get<std::string>();
  }
  return label;
}

/// llama.cpp's fastest setting in one phase at one context; 0 for none.
double best_llama(
    const std::vector<Json>& runs, std::size_t point, const char* phase) {
  double best = 0;
  for (const Json& run : runs) {
    if (run["policy"] != "llama") continue;
    const Json& rates = run["points"][point]["tokens_per_second"];
    best = std::max(best, rates[phase].get<double>());
  }
  return best;
}

std::string decode_table(const std::vector<Json>& runs) {
  std::vector<std::vector<std::string>> rows{
      {"policy",
       "tokens",
       "prefill tok/s",
       "decode tok/s",
       "attention %",
       "eviction %",
       "KV MiB",
       "peak memory MiB"}};
  const std::size_t points = runs.front()["points"].size();
  bool compared = false;
  for (std::size_t p = 0; p < points; ++p) {
    for (const Json& run : runs) {
      const Json& point = run["points"][p];
      const auto rate = [&](const char* phase) {
        const double own = point["tokens_per_second"][phase].get<double>();
        const double best = best_llama(runs, p, phase);
        compared = compared || best > 0;
        return fmt::format("{:.1f}", own) +
               (best > 0 ? fmt::format(" {:4.2f}x", own / best) : "");
      };
      const auto share = [&](const char* part) {
        return run["policy"] == "llama"
                   ? std::string("-")
                   : fmt::format(
                         "{:.1f}", 100 * point["share"][part].get<double>());
      };
      rows.push_back(
          {label_of(run),
           std::to_string(point["context"].get<std::size_t>()),
           rate("prefill"),
           rate("decode"),
           share("attention"),
           share("eviction"),
           fmt::format("{:.1f}", mebi(point["kv_bytes_peak"])),
           p + 1 == points ? fmt::format("{:.0f}", mebi(run["peak_rss_bytes"]))
                           : "-"});
    }
  }
  return layout(rows) +
         (compared ? "(x: ratio to llama.cpp's fastest setting)\n" : "");
}

std::string fidelity_table(const std::vector<Json>& runs) {
  std::vector<std::vector<std::string>> rows{
      {"policy", "rows kept", "error", "rank correlation"}};
  for (const Json& run : runs) {
    const Json& correlation = run["mean_rank_correlation"];
    rows.push_back(
        {label_of(run),
         fmt::format("{:.1f}", run["rows_kept"].get<double>()),
         fmt::format("{:.4f}", run["mean_error"].get<double>()),
         correlation.is_null()
             ? "-"
             : fmt::format("{:.3f}", correlation.get<double>())});
  }
  return layout(rows) + "(means over the heads of global layers)\n";
}

/// Score and loss of every task at every length, a column for each run.
std::string ruler_means_table(const std::vector<Json>& runs) {
  std::vector<std::vector<std::string>> rows{{"task", "tokens"}};
  for (const Json& run : runs)
    rows[0].push_back(label_of(run));
  const Json& means = runs.front()["means"];
  for (std::size_t i = 0; i < means.size(); ++i) {
    rows.push_back(
        {means[i]["task"].get<std::string>(),
         std::to_string(means[i]["length"].get<std::size_t>())});
    for (const Json& run : runs) {
      const Json& mean = run["means"][i];
      rows.back().push_back(fmt::format(
          "{:.2f} ({:.3f})",
          mean["score"].get<double>(),
          mean["nll_per_token"].get<double>()));
    }
  }
  return "\n" + layout(rows) + "(score, in brackets nll/token)\n";
}

}  // namespace

std::string make_table(const std::string& task, const std::vector<Json>& runs) {
  if (task == "decode") return decode_table(runs);
  if (task == "fidelity") return fidelity_table(runs);
  const auto llama =
      std::find_if(runs.begin(), runs.end(), [](const Json& run) {
        return run["policy"] == "llama";
      });
  const bool compare = llama != runs.end() && runs.size() > 1;
  const std::vector<Column> columns =
      columns_of(task, compare ? &*llama : nullptr);

  std::vector<std::vector<std::string>> rows(runs.size() + 1);
  for (const Column& column : columns) {
    rows[0].push_back(column.title);
    for (std::size_t i = 0; i < runs.size(); ++i)
      rows[i + 1].push_back(column.cell(runs[i]));
  }
  std::string table = layout(rows);
  if (compare) table += "(x: ratio to llama)\n";
  if (runs.front()["protocol"] == "one-shot") {
    table +=
        "(one-shot: KV is what was left of the context; one reading and one "
        "process served all)\n";
  }
  if (task == "ruler") table += ruler_means_table(runs);
  return table;
}

}  // namespace qfilters::cli
