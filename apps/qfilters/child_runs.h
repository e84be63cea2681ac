#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "output.h"

namespace qfilters::cli {

/// What tells one candidate from another on the command line.
struct Candidate {
  std::string policy;
  std::string budget;
};

/// The flag that marks a process as one of several.
inline constexpr const char* kChildFlag = "--one-of-several";

/// Runs the parsed `eval` command once per candidate, each in a process of its
/// own, so that peak memory belongs to one candidate; one after the other, so
/// that times do. Returns each one's JSON object. Throws ChildFailed when one
/// fails, Error kRuntime when it dies or on SIGINT and SIGTERM, which are
/// passed on to it. Temporary files are removed in any case.
[[nodiscard]] std::vector<Json> run_each_alone(
    const CLI::App& command, const std::vector<Candidate>& candidates);

}  // namespace qfilters::cli
