#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "eval/run.h"
#include "output.h"

namespace qfilters::cli {

/// The options that tell one candidate from another: name and value.
using Candidate = std::vector<std::pair<std::string, std::string>>;

/// The flag that marks a process as one of several.
inline constexpr const char* kChildFlag = "--one-of-several";

enum class Order {
  kOneByOne,  ///< a candidate starts when the one before has ended
  kInTurns,   ///< all at once; each makes a step when TurnTaker lets it
};

/// Runs the parsed command once per candidate, each in a process of its own,
/// so that peak memory belongs to one candidate; never two steps at the same
/// time, so that times do. Returns each one's JSON object. Throws ChildFailed
/// when one fails, Error kRuntime when it dies or on SIGINT and SIGTERM, which
/// are passed on. Temporary files are removed in any case.
[[nodiscard]] std::vector<Json> run_children(
    const CLI::App& command,
    const std::vector<Candidate>& candidates,
    Order order);

/// The given options of `command` as another process takes them, but for
/// --policy, --budget and --json; first the names of the commands.
[[nodiscard]] std::vector<std::string> child_arguments(const CLI::App& command);

/// How a process ended.
struct ChildOutcome {
  std::vector<Json> runs;  ///< of its JSON; none where it failed
  std::string failure;     ///< why, in one line; empty where it did not
  std::string warnings;    ///< what else it wrote on stderr
};

/// Runs the program with `arguments` (without its own name) in a process of its
/// own; `progress` hears its steps. Throws Error kRuntime on SIGINT and
/// SIGTERM, which are passed on.
[[nodiscard]] ChildOutcome run_child(
    const std::vector<std::string>& arguments, const eval::Progress& progress);

/// The child's side: tells the parent of a step, on stdout.
void report_step(std::size_t done, std::size_t total);

/// The child's side of Order::kInTurns: stdin and stdout lead to the parent.
class TurnTaker {
 public:
  /// Waits for the first turn.
  TurnTaker();

  /// Ends this turn and waits for the next. Throws Error kRuntime when the
  /// parent is gone.
  void next(std::size_t done, std::size_t total);
};

}  // namespace qfilters::cli
