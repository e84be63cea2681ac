#include "eval_sweep.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <thread>

#include <fmt/core.h>

#include "qfilters/error.h"
#include "qfilters/fingerprint.h"
#include "qfilters/isa.h"
#include "qfilters/version.h"

#include "child_runs.h"
#include "eval/layouts.h"
#include "interrupt.h"
#include "run_table.h"
#include "sweep_file.h"
#include "sweep_options.h"

namespace qfilters::cli {

namespace {

/// What the command line says; each task reads its options from the command.
struct SweepArguments {
  TaskArguments shared;
  Names tasks{"perplexity", "needle", "ruler"};
  std::string out;
  PassedOn passed_on;
};

/// A task of the sweep, checked.
struct SweepTask {
  const Task* task = nullptr;
  TaskArguments arguments;
  Names command;  // of each run, without policy and budget
  Names options;  // what must not change between its runs
  std::vector<eval::RunSpec> specs;
  std::shared_ptr<const llama::Model> model;  // until all are checked
};

/// One process: a run, or all of a task whose process serves all.
struct Step {
  const SweepTask* task = nullptr;
  std::vector<SweepRun> runs;
};

// What the runs are of

/// Of a file and of what it names.
std::string file_fingerprint(
    const std::string& path, const std::vector<std::string>& named = {}) {
  std::ifstream file(path, std::ios::binary);
  Fingerprint print;
  print.add(std::string(std::istreambuf_iterator<char>(file), {}));
  for (const std::string& each : named)
    print.add(each);
  return print.hex();
}

/// Without what may move or is compared by its content.
Names options_of(const Names& command, const TaskArguments& arguments) {
  Names options;
  for (auto word = command.begin() + 2; word != command.end(); ++word) {
    const std::string name = word->substr(0, word->find('='));
    if (name == "--model" || name == "--filters") continue;
    if (name == "--text") {
      options.push_back("--text=" + file_fingerprint(arguments.text));
    } else if (name == "--file") {
      options.push_back(
          "--file=" +
          file_fingerprint(
              arguments.question_file, arguments.question_set.contexts));
    } else {
      options.push_back(*word);
    }
  }
  return options;
}

const Task& find_task(const Tasks& tasks, const std::string& name) {
  std::string known;
  for (const Task* const task : tasks) {
    if (task->name == name) return *task;
    known += (known.empty() ? "" : ", ") + task->name;
  }
  throw Error(
      ErrorKind::kInvalidArgument,
      "sweep: unknown task '" + name + "'; known: " + known);
}

std::vector<SweepTask> check_tasks(
    const CLI::App& command, const SweepArguments& sweep, const Tasks& tasks) {
  std::vector<SweepTask> checked;
  static_cast<void>(make_specs(sweep.shared.run));  // names as they were given
  for (const std::string& name : sweep.tasks) {
    const Task& task = find_task(tasks, name);
    const bool again =
        std::any_of(checked.begin(), checked.end(), [&](const SweepTask& each) {
          return each.task == &task;
        });
    if (again) continue;
    SweepTask& each = checked.emplace_back();
    each.task = &task;
    each.command = command_of(command, task);
    Names all = each.command;
    all.push_back("--policy=" + joined(sweep.shared.run.policies));
    all.push_back("--budget=" + joined(sweep.shared.run.budgets));
    parse(all, task, each.arguments);
    each.model = check_task(task, each.arguments);
    each.options = options_of(each.command, each.arguments);
    each.specs = make_specs(each.arguments.run);
  }
  return checked;
}

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != line.npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

std::string now() {
  const std::time_t time = std::time(nullptr);
  char text[32] = {};
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", std::gmtime(&time));
  return text;
}

std::string command_line(const CLI::App& command) {
  std::string line = "qfilters";
  for (const std::string& word : child_arguments(command)) {
    line += " " + word;
  }
  for (const char* const name : {"--policy", "--budget"}) {
    const CLI::Option* const option = command.get_option(name);
    if (option->count() > 0) {
      line += fmt::format(" {}={}", name, joined(option->results()));
    }
  }
  return line;
}

Json settings_of(
    const CLI::App& command,
    const SweepArguments& sweep,
    const SweepTask& task) {
  const llama::Model& model = *task.model;
  const RunOptions& run = sweep.shared.run;
  Json filters = Json::object();
  for (const std::string& policy : run.policies) {
    const auto bank = eval::load_run_filters(policy, run.filters, model);
    if (bank != nullptr) filters[policy] = bank->fingerprint();
  }
  return {
      {"command", command_line(command)},
      {"date", now()},
      {"version", kVersion},
      {"model",
       {{"name", model.name()}, {"fingerprint", model.file_fingerprint()}}},
      {"model_file", run.model},
      {"text", sweep.shared.text},
      {"filters", filters},
      {"filter_files", run.filters},
      {"protocol", run.protocol},
      {"machine",
       {{"processor", processor()},
        {"processors", std::thread::hardware_concurrency()},
        {"isa", active_isa()},
        {"threads", run.common.threads}}}};
}

// The runs

/// Every policy with every budget, each once.
std::vector<SweepRun> runs_of(const SweepTask& task) {
  std::vector<SweepRun> runs;
  for (const eval::RunSpec& spec : task.specs) {
    const SweepRun run{
        task.task->name,
        spec.policy,
        eval::is_bounded(spec.policy) ? spec.budget.text : ""};
    if (std::find(runs.begin(), runs.end(), run) == runs.end()) {
      runs.push_back(run);
    }
  }
  return runs;
}

std::vector<Step> steps_of(
    const std::vector<SweepTask>& tasks, const SweepFile& file) {
  std::vector<Step> steps;
  for (const SweepTask& task : tasks) {
    const bool together = serves_all(*task.task, task.arguments);
    Step all{&task, {}};
    for (const SweepRun& run : runs_of(task)) {
      if (file.has(run)) continue;
      if (together) {
        all.runs.push_back(run);
      } else {
        steps.push_back({&task, {run}});
      }
    }
    if (!all.runs.empty()) steps.push_back(all);
  }
  return steps;
}

/// --policy and --budget of a step. One that serves all runs every pair, also
/// pairs that are there already.
Names arguments_of(const Step& step) {
  Names words = step.task->command;
  Names policies;
  Names budgets;
  const auto add = [](Names& to, const std::string& word) {
    if (!word.empty() && std::find(to.begin(), to.end(), word) == to.end()) {
      to.push_back(word);
    }
  };
  for (const SweepRun& run : step.runs) {
    add(policies, run.policy);
    add(budgets, run.budget);
  }
  words.push_back("--policy=" + joined(policies));
  if (!budgets.empty()) words.push_back("--budget=" + joined(budgets));
  return words;
}

std::string describe(const Step& step) {
  const SweepRun& run = step.runs.front();
  if (step.runs.size() > 1) {
    return fmt::format("{} of {} candidates", run.task, step.runs.size());
  }
  return run.task + " " + run.policy + (run.budget.empty() ? "" : " ") +
         run.budget;
}

/// Seconds that what is left will take, from what took place: runs of a task
/// take about the same. None while nothing has taken place.
class Estimate {
 public:
  explicit Estimate(const SweepFile& file) {
    for (const auto& [task, part] : file.json().at("tasks").items()) {
      for (const Json& run : part["runs"]) {
        const Json seconds = run.value("seconds", Json::object());
        add(task, seconds.value("prefill", 0.0) + seconds.value("decode", 0.0));
      }
    }
  }

  void add(const std::string& task, double seconds) {
    for (Mean* const mean : {&tasks_[task], &all_}) {
      mean->seconds += seconds;
      ++mean->count;
    }
  }

  [[nodiscard]] std::string left(
      std::vector<Step>::const_iterator step,
      std::vector<Step>::const_iterator end) const {
    if (all_.count == 0) return "";
    double seconds = 0;
    for (; step != end; ++step) {
      const auto found = tasks_.find(step->task->task->name);
      const Mean& mean = found == tasks_.end() ? all_ : found->second;
      seconds += mean.seconds / static_cast<double>(mean.count);
    }
    return seconds < 90 ? fmt::format(", about {:.0f} s left", seconds)
                        : fmt::format(", about {:.0f} min left", seconds / 60);
  }

 private:
  struct Mean {
    double seconds = 0;
    std::size_t count = 0;
  };

  std::map<std::string, Mean> tasks_;
  Mean all_;
};

/// Runs one step and stores what came of it.
void run_step(const Step& step, const std::string& label, SweepFile& file) {
  ChildOutcome outcome;
  {
    ProgressBar bar(label);
    bar.update(0, 1);
    outcome = run_child(
        arguments_of(step),
        [&](std::size_t done, std::size_t total) { bar.update(done, total); });
  }
  fmt::print(stderr, "{}", outcome.warnings);
  for (const SweepRun& run : step.runs) {
    if (outcome.failure.empty()) continue;
    file.fail(run, outcome.failure);
  }
  if (!outcome.failure.empty()) {
    warn(describe(step) + " failed: " + outcome.failure);
  }
  const std::string& task = step.task->task->name;
  std::vector<Json> fresh;
  for (const Json& run : outcome.runs) {
    const Json budget = run.value("budget_asked", Json());
    const SweepRun key{
        task,
        run.at("policy"),
        budget.is_null() ? "" : budget.get<std::string>()};
    if (!file.has(key)) fresh.push_back(run);
  }
  file.add(task, fresh);
  file.save();
}

void run_steps(const std::vector<Step>& steps, SweepFile& file) {
  const InterruptGuard guard(InterruptGuard::Mode::kAlways);
  Estimate estimate(file);
  for (auto step = steps.begin(); step != steps.end(); ++step) {
    if (InterruptGuard::signal() != 0) {
      throw Error(ErrorKind::kRuntime, "eval: interrupted");
    }
    const auto start = std::chrono::steady_clock::now();
    const std::string label = fmt::format(
        "{}/{} {}{}",
        step - steps.begin() + 1,
        steps.size(),
        describe(*step),
        estimate.left(step, steps.end()));
    run_step(*step, label, file);
    const std::chrono::duration<double> took =
        std::chrono::steady_clock::now() - start;
    estimate.add(step->task->task->name, took.count());
  }
}

void print_results(const std::vector<SweepTask>& tasks, const SweepFile& file) {
  for (const SweepTask& task : tasks) {
    const std::vector<Json> runs = file.runs(task.task->name);
    if (runs.empty()) continue;
    for (const Json& run : runs) {
      warn_of_idle(run);
    }
    fmt::print("{}\n{}\n", task.task->name, make_table(task.task->name, runs));
  }
  fmt::print("report: {}\n", file.report_path().string());
}

void run_sweep(
    const CLI::App& command, SweepArguments& sweep, const Tasks& tasks) {
  std::vector<SweepTask> checked = check_tasks(command, sweep, tasks);
  eval::check_directory(sweep.out);
  std::filesystem::create_directories(sweep.out);
  const FolderLock lock(sweep.out);
  SweepFile file(sweep.out);
  file.set_settings(settings_of(command, sweep, checked.front()));
  std::vector<SweepRun> all;
  std::vector<std::string> inputs = sweep.shared.run.filters;
  inputs.insert(inputs.end(), {sweep.shared.run.model, sweep.shared.text});
  for (SweepTask& task : checked) {
    inputs.push_back(task.arguments.question_file);
    file.set_task(task.task->name, task.options);
    task.model.reset();
    for (const SweepRun& run : runs_of(task)) {
      all.push_back(run);
    }
  }
  check_outputs(
      {file.json_path().string(),
       file.report_path().string(),
       sweep.shared.run.common.json},
      inputs);
  const std::vector<Step> steps = steps_of(checked, file);
  file.plan(all);
  file.save();
  const auto there = std::count_if(
      all.begin(), all.end(), [&](const auto& run) { return file.has(run); });
  if (there > 0) {
    fmt::print(
        "{} of {} runs are there already and do not run again\n\n",
        there,
        all.size());
    flush_stdout();
  }
  run_steps(steps, file);
  write_json(sweep.shared.run.common.json, file.json());
  print_results(checked, file);
  if (file.failures() == 0) return;
  throw Error(
      ErrorKind::kRuntime,
      fmt::format("sweep: {} of {} runs failed", file.failures(), all.size()));
}

}  // namespace

void add_sweep_command(CLI::App& eval, const Tasks& tasks, Action& action) {
  CLI::App* const command = eval.add_subcommand(
      "sweep", "Several tasks with every policy and budget, and a report");
  const auto arguments = std::make_shared<SweepArguments>();
  std::string names;
  for (const Task* const task : tasks) {
    names += (names.empty() ? "" : ", ") + task->name;
  }
  command->add_option("--tasks", arguments->tasks, "Which: " + names)
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("LIST")
      ->capture_default_str();
  command
      ->add_option(
          "--out",
          arguments->out,
          "Where sweep.json and report.html go. Runs that are there already "
          "do not run again")
      ->type_name("DIR")
      ->required();
  add_text_options(*command, arguments->shared);
  add_shared_options(*command, arguments->shared);
  add_options_of_tasks(*command, tasks, arguments->passed_on);
  command->callback([&action, tasks, command, arguments] {
    action = [tasks, command, arguments] {
      run_sweep(*command, *arguments, tasks);
    };
  });
}

void add_report_command(CLI::App& eval, Action& action) {
  CLI::App* const command = eval.add_subcommand(
      "report", "Writes a sweep's report.html again from its sweep.json");
  const auto folder = std::make_shared<std::string>();
  command->add_option("DIR", *folder, "The folder of a sweep")->required();
  command->callback([&action, folder] {
    action = [folder] {
      const SweepFile file(*folder);
      if (file.json().at("tasks").empty()) {
        throw Error(
            ErrorKind::kFile,
            "report: no runs in " + file.json_path().string());
      }
      file.save();
      fmt::print("report: {}\n", file.report_path().string());
    };
  });
}

}  // namespace qfilters::cli
