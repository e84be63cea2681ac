#pragma once

#include "commands.h"
#include "sweep_options.h"

namespace qfilters::cli {

/// Adds `eval sweep`: every task with every policy and budget into one folder,
/// each run in a process of its own, none twice. `tasks`: all there are; they
/// must outlive `eval`.
void add_sweep_command(CLI::App& eval, const Tasks& tasks, Action& action);

/// Adds `eval report`: the report of such a folder again.
void add_report_command(CLI::App& eval, Action& action);

}  // namespace qfilters::cli
