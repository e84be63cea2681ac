#include "eval/report/verdict.h"

#include <algorithm>

#include <fmt/core.h>

#include "eval/report/html.h"

namespace qfilters::eval::report {

namespace {

bool competes(const Result& result) {
  const std::string query = text(*result.run, {"query"});
  return !result.budget.empty() && (query.empty() || query == "agnostic");
}

std::optional<Best> best_at(
    const std::vector<Result>& all,
    const Measure& measure,
    const std::string& budget) {
  Best best{measure, budget, {}, 0, std::nullopt, true};
  for (const Result& result : all) {
    const std::optional<double> value = measure.of(*result.run);
    if (!value || !competes(result) || result.budget != budget) continue;
    if (result.policy == "auto") {
      best.of_auto = value;
    } else {
      best.alone = false;
    }
    if (best.policies.empty() || measure.better(*value, best.value)) {
      best.policies = {result.policy};
      best.value = *value;
    } else if (!measure.better(best.value, *value)) {
      best.policies.push_back(result.policy);
    }
  }
  if (best.policies.empty()) return std::nullopt;
  return best;
}

std::string joined(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 3;
  std::string out;
  for (std::size_t i = 0; i < std::min(names.size(), kMost); ++i) {
    out += (i == 0 ? "" : ", ") + escape(names[i]);
  }
  if (names.size() > kMost) {
    out += fmt::format(" and {} others", names.size() - kMost);
  }
  return out;
}

/// A line for each measure, with its budgets.
std::string beaten_list(const std::vector<Best>& all) {
  std::string items;
  std::string measure;
  for (const Best& best : all) {
    if (!best.auto_is_beaten()) continue;
    if (measure != best.measure.title) {
      items += fmt::format(
          "{}<li>{} ({} is better): ",
          measure.empty() ? "" : "</li>\n",
          escape(best.measure.title),
          best.measure.lower_is_better ? "lower" : "higher");
      measure = best.measure.title;
    } else {
      items += "; ";
    }
    items += fmt::format(
        "at budget {} <b>{}</b> {}, auto {}",
        escape(best.budget),
        joined(best.policies),
        fixed(best.value, best.measure.digits),
        fixed(*best.of_auto, best.measure.digits));
  }
  return items.empty() ? "" : "<ul>\n" + items + "</li>\n</ul>\n";
}

std::string plural(std::size_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string words_about_auto(const Json& sweep, const std::vector<Best>& all) {
  std::vector<Best> compared;
  std::vector<Best> beaten;
  for (const Best& best : all) {
    if (!best.of_auto || best.alone) continue;
    compared.push_back(best);
    if (best.auto_is_beaten()) beaten.push_back(best);
  }
  if (compared.empty()) {
    return "<p>Policy <b>auto</b> has no run beside another bounded policy "
           "here, so nothing can be said about it.</p>\n";
  }
  std::string out;
  if (beaten.empty()) {
    out = fmt::format(
        "<p>No other query-agnostic policy beats <b>auto</b> on any task mean "
        "({} compared, ties count as not beaten).</p>\n",
        plural(compared.size(), "mean"));
  } else {
    out = fmt::format(
        "<p><b>auto</b> is beaten by another query-agnostic policy on {} of "
        "{}:</p>\n{}",
        beaten.size(),
        plural(compared.size(), "task mean"),
        beaten_list(beaten));
  }
  const std::string kinds = beaten_list(judge(sweep, ruler_kinds(sweep)));
  if (!kinds.empty()) {
    out +=
        "<details><summary>Kinds of RULER tasks where auto is beaten (few "
        "samples each, so less certain)</summary>\n" +
        kinds + "</details>\n";
  }
  return out;
}

std::string best_cell(
    const std::vector<Best>& all,
    const Measure& measure,
    const std::string& budget) {
  for (const Best& best : all) {
    if (best.budget != budget || best.measure.title != measure.title) continue;
    std::string cell = fmt::format(
        "<b>{}</b> {}",
        joined(best.policies),
        fixed(best.value, measure.digits));
    if (best.auto_is_beaten()) {
      cell += fmt::format(
          "<br><small>auto {}</small>", fixed(*best.of_auto, measure.digits));
    }
    return "<td class=\"text\">" + cell + "</td>";
  }
  return "<td class=\"text\">–</td>";
}

std::string best_table(
    const Json& sweep,
    const std::vector<Measure>& measures,
    const std::vector<Best>& all) {
  std::string rows;
  for (const Measure& measure : measures) {
    const std::optional<double> full =
        value_of(results(sweep, measure.task), measure, "full", "");
    rows += fmt::format(
        "<tr><td class=\"text\">{} <small>({})</small></td><td>{}</td>",
        escape(measure.title),
        measure.lower_is_better ? "lower is better" : "higher is better",
        full ? fixed(*full, measure.digits) : "–");
    for (const std::string& budget : budgets(sweep)) {
      rows += best_cell(all, measure, budget);
    }
    rows += "</tr>\n";
  }
  std::string head;
  for (const std::string& budget : budgets(sweep)) {
    head += "<th class=\"text\">budget " + escape(budget) + "</th>";
  }
  return "<div class=\"scroll\"><table>\n<caption>The best policy of each task "
         "mean at each budget, all query-agnostic; full keeps every "
         "row</caption>\n<thead><tr><th "
         "class=\"text\">mean</th><th>full</th>" +
         head + "</tr></thead>\n<tbody>\n" + rows + "</tbody></table></div>\n";
}

}  // namespace

std::vector<Best> judge(
    const Json& sweep, const std::vector<Measure>& measures) {
  std::vector<Best> out;
  for (const Measure& measure : measures) {
    const std::vector<Result> all = results(sweep, measure.task);
    for (const std::string& budget : budgets(sweep)) {
      std::optional<Best> best = best_at(all, measure, budget);
      if (best) out.push_back(std::move(*best));
    }
  }
  return out;
}

std::string verdict_html(const Json& sweep) {
  const std::vector<Measure> measures = task_means(sweep);
  if (measures.empty()) {
    return "<div class=\"verdict\"><p>There is no finished run "
           "yet.</p></div>\n";
  }
  const std::vector<Best> all = judge(sweep, measures);
  std::string out = "<div class=\"verdict\">\n" + words_about_auto(sweep, all) +
                    "</div>\n" + best_table(sweep, measures, all);
  return out;
}

}  // namespace qfilters::eval::report
