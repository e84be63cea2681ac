#include "sweep_options.h"

#include <functional>
#include <set>

#include <fmt/core.h>

#include "qfilters/error.h"

namespace qfilters::cli {

namespace {

std::string name_of(const CLI::Option& option) {
  return option.get_lnames().empty() ? "" : "--" + option.get_lnames().front();
}

/// The options that only this task has, as a command of its own.
void for_options_of(
    const Task& task, const std::function<void(const CLI::Option&)>& visit) {
  CLI::App app;
  TaskArguments arguments;
  task.add_options(app, arguments);
  for (const CLI::Option* const option : app.get_options()) {
    if (name_of(*option) != "--help") visit(*option);
  }
}

/// Adds an option that keeps its values as they come, once.
void add_passed_on(
    CLI::App& command,
    const std::string& name,
    const CLI::Option& like,
    const Names& tasks,
    PassedOn& passed_on) {
  if (command.get_option_no_throw(name) != nullptr) return;
  std::string preset = like.get_default_str();
  if (!preset.empty() && preset.front() != '[') preset = "[" + preset + "]";
  const std::string help =
      fmt::format("{}: {} {}", joined(tasks), like.get_description(), preset);
  command.add_option(name, passed_on[name], help)
      ->allow_extra_args(false)
      ->type_name(like.get_type_name());
}

}  // namespace

void add_options_of_tasks(
    CLI::App& command, const Tasks& tasks, PassedOn& passed_on) {
  std::map<std::string, Names> owners;
  for (const Task* const task : tasks) {
    for_options_of(*task, [&](const CLI::Option& option) {
      owners[name_of(option)].push_back(task->name);
    });
  }
  for (const Task* const task : tasks) {
    for_options_of(*task, [&](const CLI::Option& option) {
      const std::string name = name_of(option);
      const bool taken = command.get_option_no_throw(name) != nullptr &&
                         passed_on.count(name) == 0;
      if (owners[name].size() > 1 || taken) {
        add_passed_on(
            command,
            "--" + task->name + "-" + name.substr(2),
            option,
            {task->name},
            passed_on);
      }
      if (!taken) {
        add_passed_on(command, name, option, owners[name], passed_on);
      }
    });
  }
}

Names command_of(const CLI::App& sweep, const Task& task) {
  Names words{sweep.get_parent()->get_name(), task.name};
  CLI::App app;
  TaskArguments ignored;
  add_task_options(app, task, ignored);
  const std::set<std::string> own{
      "--policy", "--budget", "--json", "--tasks", "--out"};
  for (const CLI::Option* const option : app.get_options()) {
    const std::string name = name_of(*option);
    if (name.empty() || name == kChildFlag) continue;
    const CLI::Option* given =
        sweep.get_option_no_throw("--" + task.name + "-" + name.substr(2));
    if ((given == nullptr || given->count() == 0) && own.count(name) == 0) {
      given = sweep.get_option_no_throw(name);
    }
    if (given == nullptr || given->count() == 0 || name == "--help") continue;
    for (const std::string& value : given->results()) {
      words.push_back(fmt::format("{}={}", name, value));
    }
  }
  return words;
}

std::string joined(const Names& words) {
  std::string text;
  for (const std::string& word : words) {
    text += (text.empty() ? "" : ",") + word;
  }
  return text;
}

void parse(const Names& words, const Task& task, TaskArguments& arguments) {
  CLI::App app;
  add_task_options(app, task, arguments);
  std::vector<std::string> reversed(words.rbegin(), words.rend() - 2);
  try {
    app.parse(reversed);
  } catch (const CLI::ParseError& error) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "sweep: " + task.name + ": " + error.what());
  }
}

}  // namespace qfilters::cli
