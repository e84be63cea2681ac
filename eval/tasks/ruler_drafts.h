#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "eval/tasks/haystack.h"
#include "eval/tasks/ruler_samples.h"
#include "eval/tasks/word_maker.h"

namespace qfilters::eval {

/// A sample whose context can still be made as long as wanted.
struct RulerDraft {
  RulerSample sample;  ///< all but its context and its tokens
  /// The context with so many units around what is asked about; more units
  /// make a longer text. The same for the same number. Refers to the haystack.
  std::function<std::string(std::size_t units)> context;
  std::size_t least = 0;  ///< units
  std::size_t most = 0;
};

/// The draft of a known task; `length` is what its context is meant for.
[[nodiscard]] RulerDraft draft_ruler(
    std::string_view task,
    const Haystack& haystack,
    std::size_t length,
    WordMaker maker);

}  // namespace qfilters::eval
