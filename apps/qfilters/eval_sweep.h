#pragma once

#include <vector>

#include "commands.h"
#include "task_command.h"

namespace qfilters::cli {

using Tasks = std::vector<const Task*>;

/// Adds `eval sweep`: every task with every policy and budget into one folder,
/// each run in a process of its own, none twice. `tasks`: all there are; they
/// must outlive `eval`.
void add_sweep_command(CLI::App& eval, const Tasks& tasks, Action& action);

/// Adds `eval report`: the report of such a folder again.
void add_report_command(CLI::App& eval, Action& action);

}  // namespace qfilters::cli
