#pragma once

#include <functional>

#include <CLI/CLI.hpp>

namespace qfilters::cli {

/// What the parsed command line asks for; run after parsing is done, so that
/// its errors never pass through the parser.
using Action = std::function<void()>;

// Each adds one subcommand and sets `action` when it is the one given.
void add_calibrate_command(CLI::App& app, Action& action);
void add_convert_command(CLI::App& app, Action& action);
void add_inspect_command(CLI::App& app, Action& action);
void add_generate_command(CLI::App& app, Action& action);
void add_eval_command(CLI::App& app, Action& action);
void add_bench_command(CLI::App& app, Action& action);

}  // namespace qfilters::cli
