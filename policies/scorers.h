#pragma once

#include <memory>

#include "qfilters/scoring.h"

namespace qfilters::policies {

/// KeyDiff (arXiv:2504.15364): keys unlike the others stay. Score = -cos(key,
/// mean of the unit keys of the head's rows), over the rows at hand.
[[nodiscard]] std::shared_ptr<const Scorer> make_keydiff_scorer();

}  // namespace qfilters::policies
