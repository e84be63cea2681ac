#pragma once

#include <memory>
#include <vector>

#include "qfilters/scoring.h"

namespace qfilters {

/// Projection on a filter of its own for each (batch, head):
/// directions [batch * kv_heads, dim], times sign.
std::shared_ptr<const Scorer> make_group_scorer(
    std::vector<float> directions, int sign);

}  // namespace qfilters
