#include "sweep_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <unistd.h>

#include "qfilters/atomic_file.h"
#include "qfilters/error.h"

#include "eval/report.h"

namespace qfilters::cli {

namespace {

constexpr const char* kOtherFolder =
    "; give the same again or another folder with --out";

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorKind::kInvalidArgument, "sweep: " + message + kOtherFolder);
}

std::string text_of(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

void check_same(const std::string& name, const Json& there, const Json& now) {
  if (there == now) return;
  refuse(fmt::format(
      "the runs that are there have {} {}, not {}",
      name,
      text_of(there),
      text_of(now)));
}

/// Options of one side only, "--depths=20,60" say.
std::string difference(const Json& of, const Json& without) {
  std::string text;
  for (const Json& option : of) {
    if (std::find(without.begin(), without.end(), option) != without.end()) {
      continue;
    }
    text += (text.empty() ? "" : " ") + text_of(option);
  }
  return text.empty() ? "the default" : text;
}

bool is_run(const Json& json) {
  const auto has_object = [&](const char* key) {
    return json.contains(key) && json[key].is_object();
  };
  return json.is_object() && json.contains("policy") &&
         json["policy"].is_string() && has_object("kv_bytes") &&
         has_object("seconds");
}

bool is_sweep(const Json& json) {
  if (!json.is_object() || !json.contains("settings")) return false;
  if (!json["settings"].is_object() || !json.contains("tasks")) return false;
  const Json& tasks = json["tasks"];
  return tasks.is_object() &&
         std::all_of(tasks.begin(), tasks.end(), [](const Json& task) {
           return task.is_object() && task.contains("options") &&
                  task.contains("runs") && task["runs"].is_array() &&
                  std::all_of(
                      task["runs"].begin(), task["runs"].end(), is_run) &&
                  task.contains("failures") && task["failures"].is_array();
         });
}

Json to_json(const SweepRun& run) {
  return {
      {"policy", run.policy},
      {"budget_asked", run.budget.empty() ? Json(nullptr) : Json(run.budget)}};
}

bool is_of(const Json& json, const SweepRun& run) {
  const Json wanted = to_json(run);
  return json.is_object() && json.value("policy", Json()) == wanted["policy"] &&
         json.value("budget_asked", Json()) == wanted["budget_asked"];
}

}  // namespace

FolderLock::FolderLock(const std::filesystem::path& folder)
    : descriptor_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (descriptor_ >= 0 && ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0) return;
  const int error = errno;
  if (descriptor_ >= 0) ::close(descriptor_);
  if (error == EWOULDBLOCK) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "sweep: another one is at work in " + folder.string());
  }
  throw Error(
      ErrorKind::kFile,
      "sweep: cannot lock " + folder.string() + ": " + std::strerror(error));
}

FolderLock::~FolderLock() {
  ::close(descriptor_);
}

SweepFile::SweepFile(const std::filesystem::path& folder) : folder_(folder) {
  json_ = {{"settings", Json::object()}, {"tasks", Json::object()}};
  std::error_code ignored;
  if (!std::filesystem::exists(json_path(), ignored)) return;
  // A pipe would be waited for.
  if (std::filesystem::is_regular_file(json_path(), ignored)) {
    std::ifstream file(json_path());
    json_ = Json::parse(file, nullptr, /*allow_exceptions=*/false);
    if (is_sweep(json_)) return;
  }
  throw Error(
      ErrorKind::kFile,
      "sweep: " + json_path().string() + " is not what a sweep wrote");
}

void SweepFile::set_settings(const Json& settings) {
  Json& there = json_["settings"];
  Json merged = settings;
  if (!there.empty()) {
    for (const char* const key : {"version", "model"}) {
      check_same(key, there.value(key, Json()), settings.at(key));
    }
    Json filters = there.value("filters", Json::object());
    for (const auto& [policy, fingerprint] : settings.at("filters").items()) {
      check_same(
          "filters of " + policy,
          filters.value(policy, fingerprint),
          fingerprint);
      filters[policy] = fingerprint;
    }
    merged["filters"] = std::move(filters);
  }
  there = std::move(merged);
}

void SweepFile::set_task(
    const std::string& task, const std::vector<std::string>& options) {
  Json& tasks = json_["tasks"];
  if (!tasks.contains(task)) {
    tasks[task] = {
        {"task", task},
        {"options", options},
        {"planned", Json::array()},
        {"runs", Json::array()},
        {"failures", Json::array()}};
  }
  const Json now = options;
  const Json there = tasks[task]["options"];
  if (now != there && !tasks[task]["runs"].empty()) {
    refuse(fmt::format(
        "the runs of {} that are there had {}, not {}",
        task,
        difference(there, now),
        difference(now, there)));
  }
  tasks[task]["options"] = now;
}

bool SweepFile::has(const SweepRun& run) const {
  const Json& there = runs(run.task);
  return std::any_of(there.begin(), there.end(), [&](const Json& each) {
    return is_of(each, run);
  });
}

const Json& SweepFile::runs(const std::string& task) const {
  static const Json none = Json::array();
  const Json& tasks = json_["tasks"];
  return tasks.contains(task) ? tasks[task]["runs"] : none;
}

std::size_t SweepFile::failures() const {
  std::size_t count = 0;
  for (const Json& task : json_["tasks"]) {
    count += task["failures"].size();
  }
  return count;
}

void SweepFile::plan(const std::vector<SweepRun>& runs) {
  for (Json& task : json_["tasks"]) {
    task["planned"] = Json::array();
    task["failures"] = Json::array();
  }
  for (const SweepRun& run : runs) {
    json_["tasks"][run.task]["planned"].push_back(to_json(run));
  }
}

void SweepFile::add(const std::string& task, const std::vector<Json>& runs) {
  for (const Json& run : runs) {
    json_["tasks"][task]["runs"].push_back(run);
  }
}

void SweepFile::fail(const SweepRun& run, const std::string& reason) {
  Json failure = to_json(run);
  failure["reason"] = reason;
  json_["tasks"][run.task]["failures"].push_back(failure);
}

void SweepFile::save() const {
  write_json(json_path().string(), json_);
  write_file_atomically(report_path(), eval::make_report(json_));
}

std::filesystem::path SweepFile::json_path() const {
  return folder_ / "sweep.json";
}

std::filesystem::path SweepFile::report_path() const {
  return folder_ / "report.html";
}

}  // namespace qfilters::cli
