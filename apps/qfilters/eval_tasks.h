#pragma once

#include "task_command.h"

namespace qfilters::cli {

/// How "query" of a run's JSON says that the context was compressed before
/// the question was known.
inline constexpr const char* kQueryAgnostic = "agnostic";

/// The tasks of `qfilters eval` that have a file of their own.
extern const Task kRuler;
extern const Task kQuestions;

}  // namespace qfilters::cli
