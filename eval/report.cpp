#include "eval/report.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include <fmt/core.h>

#include "eval/report/heat.h"
#include "eval/report/html.h"
#include "eval/report/plot.h"
#include "eval/report/results.h"
#include "eval/report/tables.h"
#include "eval/report/verdict.h"

namespace qfilters::eval {

namespace {

using report::escape;
using report::find;
using report::Json;
using report::section;
using report::text;

std::string tag(const Json& sweep, std::string_view task) {
  return " <span class=\"tag\">" + escape(report::label_of(sweep, task)) +
         "</span>";
}

/// Policies and budgets that a task lists under `key`.
std::vector<report::Result> listed_runs(
    const Json& sweep, std::string_view task, std::string_view key) {
  std::vector<report::Result> out;
  const Json* const runs = find(sweep, {"tasks", task, key});
  if (runs == nullptr || !runs->is_array()) return out;
  for (const Json& run : *runs) {
    out.push_back({text(run, {"policy"}), text(run, {"budget_asked"}), &run});
  }
  return out;
}

/// Names of the tasks, whether they have runs or not.
std::vector<std::string> all_tasks(const Json& sweep) {
  std::vector<std::string> names;
  const Json* const tasks = find(sweep, {"tasks"});
  if (tasks == nullptr || !tasks->is_object()) return names;
  for (const auto& [name, ignored] : tasks->items()) {
    names.push_back(name);
  }
  return names;
}

std::string missing_runs(const Json& sweep) {
  std::size_t planned = 0;
  std::size_t missing = 0;
  for (const std::string& task : all_tasks(sweep)) {
    const std::vector<report::Result> there = report::results(sweep, task);
    for (const report::Result& run : listed_runs(sweep, task, "planned")) {
      const bool ran =
          std::any_of(there.begin(), there.end(), [&](const auto& each) {
            return each.name() == run.name();
          });
      ++planned;
      missing += ran ? 0 : 1;
    }
  }
  if (missing == 0) return "";
  return fmt::format(
      "<p><b>Not complete: {} of {} runs are missing.</b> The same command "
      "goes on with them.</p>\n",
      missing,
      planned);
}

std::string failed_runs(const Json& sweep) {
  std::string items;
  for (const std::string& task : all_tasks(sweep)) {
    for (const report::Result& run : listed_runs(sweep, task, "failures")) {
      items += fmt::format(
          "<li>{} {}: {}</li>\n",
          escape(task),
          escape(run.name()),
          escape(text(*run.run, {"reason"})));
    }
  }
  if (items.empty()) return "";
  return "<p><b>Runs that failed:</b></p>\n<ul>\n" + items + "</ul>\n";
}

std::string chips(const Json& sweep) {
  std::string out;
  for (const std::string& policy : report::policies(sweep)) {
    if (policy == "full" || policy == "llama") continue;
    std::string marks = report::marks(sweep, policy);
    out += fmt::format(
        "<button type=\"button\" aria-pressed=\"false\" {}>{}</button>\n",
        marks,
        escape(policy));
  }
  return "<div class=\"chips\">\n" + out + "</div>\n";
}

std::string plots(const Json& sweep) {
  std::string out;
  for (const report::Measure& measure : report::task_means(sweep)) {
    out += report::quality_plot(sweep, measure);
  }
  return out.empty()
             ? ""
             : chips(sweep) + "<div class=\"grid\">\n" + out + "</div>\n";
}

std::string item(std::string_view name, const std::string& value) {
  if (value.empty()) return "";
  return fmt::format("<dt>{}</dt><dd>{}</dd>\n", name, value);
}

std::string listed(const Json* json) {
  std::string out;
  if (json == nullptr || !json->is_structured()) return out;
  for (const auto& [key, value] : json->items()) {
    const std::string word =
        value.is_string() ? value.get<std::string>() : value.dump();
    out += (out.empty() ? "" : ", ") +
           (json->is_object() ? escape(key) + " " : std::string()) +
           escape(word);
  }
  return out;
}

std::string what_was_run(const Json& sweep) {
  const auto setting = [&](std::string_view key) {
    return escape(text(sweep, {"settings", key}));
  };
  std::string items;
  const std::string command = setting("command");
  if (!command.empty()) {
    items += item("command", "<code>" + command + "</code>");
  }
  items += item("date", setting("date"));
  items += item("qfilters", setting("version"));
  items += item("model", listed(find(sweep, {"settings", "model"})));
  items += item("model file", setting("model_file"));
  items += item("text", setting("text"));
  items += item("filters", listed(find(sweep, {"settings", "filters"})));
  items +=
      item("filter files", listed(find(sweep, {"settings", "filter_files"})));
  items += item("machine", listed(find(sweep, {"settings", "machine"})));
  for (const std::string& task : report::tasks(sweep)) {
    const Json* const options = find(sweep, {"tasks", task, "options"});
    const std::string words = listed(options);
    items += item(
        escape(task),
        escape(report::label_of(sweep, task)) +
            (words.empty() ? "" : "; <code>" + words + "</code>"));
  }
  return items.empty() ? "" : "<dl>\n" + items + "</dl>\n";
}

constexpr const char* kAgnostic =
    "Each context was read and cut to its budget before anything was asked "
    "about it, the same for every policy.";

std::string quality_sections(const Json& sweep) {
  return section(
             "Quality against memory",
             std::string(
                 "Up and to the left is good where higher is better, down and "
                 "to the left where lower is. <b>auto</b> is blue; point at or "
                 "tap another policy to bring it out everywhere on this "
                 "page. ") +
                 kAgnostic,
             plots(sweep)) +
         section(
             "All numbers",
             "Small figures behind a result: its change against full, of "
             "perplexity in percent, of shares in points of a hundred. Behind "
             "KV bytes: their ratio to all rows. Tap a heading to sort.",
             report::numbers_table(sweep)) +
         section(
             "Needles",
             "A number hidden in a text, asked for when the text was cut. "
             "Columns: its depth in percent. Cells: found of hidden, and the "
             "loss of the answer per token; the stronger the colour, the "
             "likelier the answer." +
                 tag(sweep, "needle"),
             report::needle_maps(sweep)) +
         section(
             "RULER by kind of task",
             "Share of the expected answers that were given, 0 to 1." +
                 tag(sweep, "ruler"),
             report::ruler_table(sweep));
}

std::string cost_sections(const Json& sweep) {
  const std::string timed = report::timed_task(sweep);
  const std::string mapped = report::mapped_task(sweep);
  return section(
             "Speed",
             "Taken while <b>" + escape(timed) +
                 "</b> ran, one run after the other; the share of eviction is "
                 "of prefill and decode together." +
                 tag(sweep, timed),
             report::speed_table(sweep)) +
         section(
             "Rows by layer and head",
             "What each KV head held when <b>" + escape(mapped) +
                 "</b> ended: layers from left to right, heads from top to "
                 "bottom, a stronger colour for more rows, one scale per "
                 "budget "
                 "(three times the mean and more is strongest)." +
                 tag(sweep, mapped),
             report::row_maps(sweep)) +
         section(
             "Fidelity of attention",
             "Layers from left to right, heads from top to bottom. Error: "
             "a stronger red is worse, on a log scale from 0.001 to 1. "
             "Correlation: a stronger green is better, red is below zero; "
             "budgets that do not change "
             "it are left out." +
                 tag(sweep, "fidelity"),
             report::fidelity_maps(sweep)) +
         section(
             "What was run",
             std::string("Every number on this page comes from these runs. ") +
                 kAgnostic,
             what_was_run(sweep));
}

}  // namespace

std::string make_report(const Json& sweep) {
  const std::string model = text(sweep, {"settings", "model", "name"});
  const std::string title =
      "KV cache policies" + (model.empty() ? "" : " on " + escape(model));
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, "
      "initial-scale=1\">\n<title>{}</title>\n<style>{}</style>\n</head>\n"
      "<body>\n<h1>{}</h1>\n{}{}{}<script>{}</script>\n</body>\n</html>\n",
      title,
      report::style(),
      title,
      report::verdict_html(sweep),
      missing_runs(sweep) + failed_runs(sweep),
      quality_sections(sweep) + cost_sections(sweep),
      report::script());
}

}  // namespace qfilters::eval
