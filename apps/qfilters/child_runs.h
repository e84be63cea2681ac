#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

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
