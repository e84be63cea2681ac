#pragma once

#include <map>
#include <string>
#include <vector>

#include "task_command.h"

namespace qfilters::cli {

using Tasks = std::vector<const Task*>;
using Names = std::vector<std::string>;

/// Values of options as they came, by the option's name; a task parses them.
using PassedOn = std::map<std::string, Names>;

/// Adds the tasks' own options to the sweep. They keep their names; one that
/// several tasks have, or the sweep itself, also goes by --TASK-NAME, for that
/// task alone. `passed_on` must outlive the parsing.
void add_options_of_tasks(
    CLI::App& command, const Tasks& tasks, PassedOn& passed_on);

/// The command line of a task's runs, from the options that were given to the
/// sweep: the names of the commands first, without policy, budget and outputs.
[[nodiscard]] Names command_of(const CLI::App& sweep, const Task& task);

/// Parses such a command line as the task's own command would. Throws Error
/// kInvalidArgument.
void parse(const Names& words, const Task& task, TaskArguments& arguments);

/// "a,b,c".
[[nodiscard]] std::string joined(const Names& words);

}  // namespace qfilters::cli
