#include "eval/report.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "eval/report/html.h"
#include "eval/report/plot.h"
#include "eval/report/verdict.h"

namespace qfilters::eval {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using report::Best;
using report::Json;
using report::judge;
using report::task_means;

Json run_of(const std::string& policy, const char* budget, const Json& more) {
  Json run{
      {"policy", policy},
      {"budget_asked", budget == nullptr ? Json(nullptr) : Json(budget)},
      {"kv_bytes", {{"peak", 1 << 20}, {"full", 1 << 22}}}};
  run.update(more);
  return run;
}

Json sweep_of(const std::string& task, const std::vector<Json>& runs) {
  return {{"settings", Json::object()}, {"tasks", {{task, {{"runs", runs}}}}}};
}

Json perplexities(const std::vector<std::pair<std::string, double>>& values) {
  std::vector<Json> runs;
  for (const auto& [policy, value] : values)
    runs.push_back(run_of(policy, "512", {{"perplexity", value}}));
  return sweep_of("perplexity", runs);
}

std::vector<Best> verdict_of(const Json& sweep) {
  return judge(sweep, task_means(sweep));
}

TEST(ReportVerdictTest, NamesWhoBeatsAutoWhereLowerIsBetter) {
  const Json sweep =
      perplexities({{"auto", 23.5}, {"h2o", 22.5}, {"tova", 30}});
  const std::vector<Best> all = verdict_of(sweep);
  ASSERT_EQ(all.size(), 1U);
  EXPECT_TRUE(all[0].auto_is_beaten());
  EXPECT_THAT(all[0].policies, ElementsAre("h2o"));
  const std::string page = make_report(sweep);
  EXPECT_THAT(
      page,
      HasSubstr("is beaten by another query-agnostic policy on 1 "
                "of 1 task mean:"));
  EXPECT_THAT(page, HasSubstr("at budget 512 <b>h2o</b> 22.50, auto 23.50"));
}

TEST(ReportVerdictTest, SaysThatAutoIsNotBeaten) {
  const Json sweep = perplexities({{"h2o", 30}, {"auto", 23.5}});
  EXPECT_FALSE(verdict_of(sweep).at(0).auto_is_beaten());
  const std::string page = make_report(sweep);
  EXPECT_THAT(page, HasSubstr("No other query-agnostic policy beats"));
  EXPECT_THAT(page, Not(HasSubstr("is beaten by")));
}

TEST(ReportVerdictTest, KnowsWhereHigherIsBetter) {
  const Json sweep = sweep_of(
      "needle",
      {run_of("auto", "256", {{"accuracy", 0.5}, {"mean_nll", 1.0}}),
       run_of("h2o", "256", {{"accuracy", 0.75}, {"mean_nll", 2.0}})});
  const std::vector<Best> all = verdict_of(sweep);
  ASSERT_EQ(all.size(), 2U);
  EXPECT_TRUE(all[0].auto_is_beaten());   // the share found
  EXPECT_FALSE(all[1].auto_is_beaten());  // the loss
}

TEST(ReportVerdictTest, TiesAsFarAsIsShownBeatNobody) {
  const Json sweep = perplexities({{"auto", 22.504}, {"h2o", 22.501}});
  const Best best = verdict_of(sweep).at(0);
  EXPECT_THAT(best.policies, ElementsAre("auto", "h2o"));
  EXPECT_FALSE(best.auto_is_beaten());
}

TEST(ReportVerdictTest, ComparesNeitherFullNorLlamaNorWhatSawTheQuestion) {
  Json sweep = sweep_of(
      "ruler",
      {run_of("auto", "512", {{"score", 0.5}}),
       run_of("full", nullptr, {{"score", 1.0}}),
       run_of("llama", nullptr, {{"score", 1.0}}),
       run_of("h2o", "512", {{"score", 0.9}, {"query", "aware"}})});
  EXPECT_FALSE(verdict_of(sweep).at(0).auto_is_beaten());
  EXPECT_THAT(make_report(sweep), HasSubstr("nothing can be said about it"));
}

TEST(ReportVerdictTest, ComparesBudgetsApart) {
  const Json sweep = sweep_of(
      "perplexity",
      {run_of("auto", "256", {{"perplexity", 25}}),
       run_of("auto", "1024", {{"perplexity", 22}}),
       run_of("h2o", "256", {{"perplexity", 24}}),
       run_of("h2o", "1024", {{"perplexity", 23}})});
  const std::vector<Best> all = verdict_of(sweep);
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].budget, "256");
  EXPECT_TRUE(all[0].auto_is_beaten());
  EXPECT_FALSE(all[1].auto_is_beaten());
}

TEST(ReportVerdictTest, WhatIsNoNumberNeitherWinsNorLoses) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Json sweep = perplexities({{"auto", 23}, {"h2o", nan}, {"tova", 24}});
  EXPECT_THAT(verdict_of(sweep).at(0).policies, ElementsAre("auto"));
  Json without = sweep;
  without["tasks"]["perplexity"]["runs"][0]["perplexity"] = nullptr;
  EXPECT_THAT(verdict_of(without).at(0).policies, ElementsAre("tova"));
  EXPECT_FALSE(verdict_of(without).at(0).auto_is_beaten());
}

TEST(ReportTest, LeavesOutWhatWasNotMeasured) {
  const std::string page = make_report(perplexities({{"auto", 23}}));
  EXPECT_THAT(page, HasSubstr("Quality against memory"));
  for (const char* const title :
       {"<h2>Needles", "<h2>RULER", "<h2>Speed", "<h2>Rows", "<h2>Fidelity"}) {
    EXPECT_THAT(page, Not(HasSubstr(title)));
  }
}

TEST(ReportTest, ShowsFidelityWhereItIs) {
  const Json run = run_of(
      "auto",
      "64",
      {{"mean_error", 0.125},
       {"protocol", "one-shot"},
       {"fidelity",
        {{"error", {{0.1, 0.15}}},
         {"rank_correlation", {{0.5, nullptr}}},
         {"rows", {{64, 64}}}}}});
  const std::string page = make_report(sweep_of("fidelity", {run}));
  EXPECT_THAT(page, HasSubstr("<h2>Fidelity"));
  EXPECT_THAT(page, HasSubstr("mean 0.1250"));
  EXPECT_THAT(page, HasSubstr("layer 0, head 1: 0.1500"));
  EXPECT_THAT(page, HasSubstr("query-agnostic, one-shot"));
}

TEST(ReportTest, DrawsHeadsThatDifferAndNamesThoseThatDoNot) {
  const std::string page = make_report(sweep_of(
      "perplexity",
      {run_of("auto", "64", {{"rows_by_head", {{60, 68}}}}),
       run_of("h2o", "64", {{"rows_by_head", {{64, 64}}}})}));
  EXPECT_THAT(page, HasSubstr("60 to 68 rows"));
  EXPECT_THAT(page, HasSubstr("same number of rows with h2o (64)"));
}

TEST(ReportTest, EscapesWhatItDidNotWrite) {
  const std::string bad = "<script>alert('\"&')</script>";
  Json sweep = sweep_of(
      "needle",
      {run_of(
          bad,
          "5\"<",
          {{"accuracy", 1},
           {"query", bad},
           {"protocol", bad},
           {"rows_by_head", {{1, 2}}},
           {"cells",
            {{{"length", bad},
              {"depth", bad},
              {"key", bad},
              {"hit", true},
              {"nll_per_token", 1}}}}})});
  sweep["settings"] = {
      {"command", bad},
      {"model", {{"name", bad}, {bad, bad}}},
      {"text", bad},
      {"machine", {{bad, bad}}}};
  sweep["tasks"]["needle"]["options"] = {bad};
  sweep["tasks"]["needle"]["failures"] = {
      {{"policy", bad}, {"budget_asked", bad}, {"reason", bad}}};
  sweep["tasks"]["ruler"] = {
      {"runs",
       {run_of(bad, bad.c_str(), {{"tasks", {{bad, {{"score", 1}}}}}})}}};
  const std::string page = make_report(sweep);
  EXPECT_THAT(page, Not(HasSubstr("<script>alert")));
  EXPECT_THAT(page, Not(HasSubstr("5\"<")));
  EXPECT_THAT(page, HasSubstr("&lt;script&gt;alert(&#39;&quot;&amp;&#39;)"));
}

TEST(ReportTest, ReadsAnythingWithoutFalling) {
  for (const char* const text :
       {"null",
        "[]",
        "{}",
        R"({"tasks": 3})",
        R"({"tasks": {"needle": null, "ruler": {"runs": {}}}})",
        R"({"tasks": {"needle": {"runs": [1, null, {}, {"policy": 3}]}}})",
        R"({"tasks": {"needle": {"runs": [{"policy": "auto", "cells": [1, {}],
            "kv_bytes": 3, "seconds": [], "rows_by_head": [3, ["x"]]}]}}})",
        R"({"tasks": {"perplexity": {"planned": [1], "failures": [2],
            "runs": [{"policy": "a", "budget": 1, "perplexity": 0,
                      "kv_bytes": {"peak": 0}}]}}})",
        R"({"settings": {"model": [1], "filters": "x"}, "tasks": {}})"}) {
    const std::string page = make_report(Json::parse(text));
    EXPECT_THAT(page, HasSubstr("</html>")) << text;
    EXPECT_THAT(page, Not(HasSubstr(">nan"))) << text;
  }
}

TEST(ReportTest, SaysWhatFailedAndWhatIsMissing) {
  Json sweep = perplexities({{"auto", 23}});
  sweep["tasks"]["perplexity"]["planned"] = {
      {{"policy", "auto"}, {"budget_asked", "512"}},
      {{"policy", "h2o"}, {"budget_asked", "512"}}};
  EXPECT_THAT(make_report(sweep), HasSubstr("1 of 2 runs are missing"));
  sweep["tasks"]["perplexity"]["failures"] = {
      {{"policy", "h2o"}, {"budget_asked", "512"}, {"reason", "no memory"}}};
  EXPECT_THAT(make_report(sweep), HasSubstr("perplexity h2o 512: no memory"));
}

TEST(ReportTest, NeedsNoNetwork) {
  const std::string page = make_report(perplexities({{"auto", 23}}));
  for (const char* const word : {"http:", "https:", "src=", "@import", "url("})
    EXPECT_THAT(page, Not(HasSubstr(word)));
}

TEST(ReportPlotTest, LabelsKeepApartAndInside) {
  EXPECT_THAT(report::spread({}, 10, 0, 100), IsEmpty());
  EXPECT_THAT(report::spread({5, 50}, 10, 0, 100), ElementsAre(5, 50));
  EXPECT_THAT(
      report::spread({50, 50, 51}, 10, 0, 100), ElementsAre(50, 60, 70));
  EXPECT_THAT(
      report::spread({98, 99, 100}, 10, 0, 100), ElementsAre(80, 90, 100));
}

}  // namespace
}  // namespace qfilters::eval
