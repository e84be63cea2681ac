#include "eval/report/tables.h"

#include <algorithm>
#include <cmath>

#include <fmt/core.h>

#include "eval/report/html.h"

namespace qfilters::eval::report {

namespace {

/// Policies and budgets over all tasks, each once.
std::vector<Result> candidates(const Json& sweep) {
  std::vector<Result> out;
  for (const std::string& policy : policies(sweep)) {
    std::vector<std::string> all{""};
    for (const std::string& budget : budgets(sweep)) {
      all.push_back(budget);
    }
    for (const std::string& budget : all) {
      for (const std::string& task : tasks(sweep)) {
        const std::vector<Result> runs = results(sweep, task);
        const auto found =
            std::find_if(runs.begin(), runs.end(), [&](const Result& run) {
              return run.policy == policy && run.budget == budget;
            });
        if (found == runs.end()) continue;
        out.push_back(*found);
        break;
      }
    }
  }
  return out;
}

std::string first_cell(const std::string& name) {
  return fmt::format("<td data-v=\"{}\">{}</td>", escape(name), escape(name));
}

std::string none() {
  return "<td data-v=\"\">–</td>";
}

std::string row(
    const Json& sweep, const Result& result, const std::string& cells) {
  return fmt::format(
      "<tr {}>{}{}</tr>\n",
      marks(sweep, result.policy),
      first_cell(result.name()),
      cells);
}

/// How far a value lies from full's: perplexity in percent, shares in points
/// of a hundred, the others as they are (full's loss may be next to nothing).
std::string change(const Measure& measure, double value, double full) {
  const bool ratio = measure.task == "perplexity" && full > 0;
  const double by = ratio           ? (value / full - 1) * 100
                    : measure.share ? (value - full) * 100
                                    : value - full;
  const char* const kind = measure.better(value, full)   ? "better"
                           : measure.better(full, value) ? "worse"
                                                         : "same";
  return fmt::format(
      " <small class=\"{}\">{}{}{}</small>",
      kind,
      by >= 0 ? "+" : "",
      fixed(by, ratio || measure.share ? 1 : measure.digits),
      ratio ? " %" : "");
}

std::string measure_cell(
    const std::vector<Result>& all,
    const Measure& measure,
    const Result& result) {
  const auto value = value_of(all, measure, result.policy, result.budget);
  if (!value) return none();
  const auto full = value_of(all, measure, "full", "");
  const std::string by =
      full && result.policy != "full" ? change(measure, *value, *full) : "";
  return fmt::format(
      "<td data-v=\"{}\">{}{}</td>", *value, fixed(*value, measure.digits), by);
}

const Json* run_of(const std::vector<Result>& all, const Result& like) {
  for (const Result& result : all) {
    if (result.policy == like.policy && result.budget == like.budget) {
      return result.run;
    }
  }
  return nullptr;
}

std::string bytes_cell(const std::vector<Result>& all, const Result& result) {
  const Json* const run = run_of(all, result);
  if (run == nullptr) return none();
  const auto bytes = number(*run, {"kv_bytes", "peak"});
  if (!bytes) return none();
  const auto full = number(*run, {"kv_bytes", "full"});
  const std::string share =
      full && *full > 0
          ? fmt::format(" <small>{}x</small>", fixed(*bytes / *full, 2))
          : "";
  return fmt::format(
      "<td data-v=\"{}\">{}{}</td>", *bytes, bytes_text(*bytes), share);
}

std::string plain_cell(
    const std::vector<Result>& all,
    const Result& result,
    std::initializer_list<std::string_view> keys,
    int digits) {
  const Json* const run = run_of(all, result);
  const auto value = run == nullptr ? std::nullopt : number(*run, keys);
  if (!value) return none();
  return fmt::format(
      "<td data-v=\"{}\">{}</td>", *value, fixed(*value, digits));
}

std::string heading(std::string_view title, std::string_view small) {
  return fmt::format(
      "<th scope=\"col\">{}<br><small>{}</small></th>",
      escape(title),
      escape(small));
}

}  // namespace

std::string numbers_table(const Json& sweep) {
  const std::vector<Measure> measures = task_means(sweep);
  std::string head = "<th scope=\"col\">policy, budget</th>";
  std::vector<std::string> rows;
  const std::vector<Result> all = candidates(sweep);
  rows.resize(all.size());
  for (const std::string& task : tasks(sweep)) {
    const std::vector<Result> runs = results(sweep, task);
    for (const Measure& measure : measures) {
      if (measure.task != task) continue;
      head += heading(measure.title, label_of(sweep, task));
      for (std::size_t i = 0; i < all.size(); ++i) {
        rows[i] += measure_cell(runs, measure, all[i]);
      }
    }
  }
  for (const std::string& task : tasks(sweep)) {
    const std::vector<Result> runs = results(sweep, task);
    head += heading("rows kept", task) + heading("KV peak", task) +
            heading("evictions", task);
    for (std::size_t i = 0; i < all.size(); ++i) {
      rows[i] += plain_cell(runs, all[i], {"rows_kept"}, 0) +
                 bytes_cell(runs, all[i]) +
                 plain_cell(runs, all[i], {"evictions"}, 0);
    }
  }
  if (all.empty()) return "";
  std::string body;
  for (std::size_t i = 0; i < all.size(); ++i) {
    body += row(sweep, all[i], rows[i]);
  }
  return "<div class=\"scroll\"><table class=\"wide\"><thead><tr>" + head +
         "</tr></thead>\n<tbody>\n" + body + "</tbody></table></div>\n";
}

namespace {

/// Lets a line break after an underscore.
std::string breakable(const std::string& text) {
  std::string out;
  for (const char c : text) {
    out += c;
    if (c == '_') out += "<wbr>";
  }
  return out;
}

}  // namespace

std::string ruler_table(const Json& sweep) {
  const std::vector<Measure> kinds = ruler_kinds(sweep);
  const std::vector<Result> all = results(sweep, "ruler");
  if (kinds.empty()) return "";
  std::string head = "<th scope=\"col\">policy, budget</th><th>mean</th>";
  for (const Measure& kind : kinds) {
    head += "<th scope=\"col\">" + breakable(escape(kind.title)) + "</th>";
  }
  const Measure mean{"ruler", {"score"}, "mean", false, 3, true};
  std::string body;
  for (const Result& result : all) {
    std::string cells;
    const auto add = [&](const Measure& measure) {
      const auto value = measure.of(*result.run);
      if (!value) {
        cells += none();
        return;
      }
      std::string cell = heat_cell(*value, fixed(*value, 2));
      cells += cell.insert(3, fmt::format(" data-v=\"{}\"", *value));
    };
    add(mean);
    for (const Measure& kind : kinds) {
      add(kind);
    }
    body += row(sweep, result, cells);
  }
  return "<div class=\"scroll\"><table class=\"wide\"><thead><tr>" + head +
         "</tr></thead>\n<tbody>\n" + body + "</tbody></table></div>\n";
}

std::string timed_task(const Json& sweep) {
  for (const std::string& task : tasks(sweep)) {
    const std::vector<Result> all = results(sweep, task);
    const bool timed =
        std::any_of(all.begin(), all.end(), [](const Result& result) {
          return number(*result.run, {"tokens_per_second", "prefill"})
                     .value_or(0) > 0;
        });
    if (timed) return task;
  }
  return "";
}

namespace {

double speed_of(const Result& result, std::string_view phase) {
  return number(*result.run, {"tokens_per_second", phase}).value_or(0);
}

std::string bar_cell(double value, double most) {
  if (value <= 0) return none();
  return fmt::format(
      "<td class=\"bars\" data-v=\"{}\"><span class=\"bar\" style=\"width:"
      "{:.1f}em\"></span>{}</td>",
      value,
      7 * value / most,
      fixed(value, 1));
}

std::string eviction_cell(const Result& result) {
  const double all = number(*result.run, {"seconds", "prefill"}).value_or(0) +
                     number(*result.run, {"seconds", "decode"}).value_or(0);
  const auto eviction = number(*result.run, {"seconds", "eviction"});
  if (!eviction || all <= 0) return none();
  const double share = *eviction / all * 100;
  return fmt::format("<td data-v=\"{}\">{} %</td>", share, fixed(share, 1));
}

}  // namespace

std::string speed_table(const Json& sweep) {
  const std::vector<Result> all = results(sweep, timed_task(sweep));
  double prefill = 0;
  double decode = 0;
  for (const Result& result : all) {
    prefill = std::max(prefill, speed_of(result, "prefill"));
    decode = std::max(decode, speed_of(result, "decode"));
  }
  if (prefill <= 0) return "";
  std::string body;
  for (const Result& result : all) {
    const auto memory = number(*result.run, {"peak_rss_bytes"});
    body +=
        row(sweep,
            result,
            bar_cell(speed_of(result, "prefill"), prefill) +
                bar_cell(speed_of(result, "decode"), decode) +
                eviction_cell(result) +
                (memory ? fmt::format(
                              "<td data-v=\"{}\">{}</td>",
                              *memory,
                              bytes_text(*memory))
                        : none()));
  }
  return "<div class=\"scroll\"><table class=\"wide\"><thead><tr><th>policy, "
         "budget</th><th>prefill, tokens/s</th><th>decode, tokens/s</th>"
         "<th>share of eviction</th><th>peak memory of the process</th></tr>"
         "</thead>\n<tbody>\n" +
         body + "</tbody></table></div>\n";
}

}  // namespace qfilters::eval::report
