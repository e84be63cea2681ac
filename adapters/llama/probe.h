#pragma once

#include <vector>

#include "llama/model.h"

namespace qfilters::llama {

/// What the attention of a loaded model looks like, found by decoding a few
/// tokens in a throw-away context. Layers in ascending order. Throws Error
/// kUnsupported, without the model's name, when the engine could not take this
/// attention over.
[[nodiscard]] std::vector<AttentionLayer> probe_layers(
    llama_model& model, int threads);

}  // namespace qfilters::llama
