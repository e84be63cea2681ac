#pragma once

#include <vector>

#include "qfilters/query_statistics.h"

#include "llama/model.h"

namespace qfilters::llama {

/// How RoPE turns queries and keys in the global layers of a model, one for
/// each of layers(); nothing turns in the place of a windowed layer, whose base
/// may be another. Understands pairs of neighbours and of halves, rotated parts
/// of a head, linear scaling and factors of frequencies (rope_freqs). Throws
/// Error kUnsupported, naming the model, for anything else.
[[nodiscard]] std::vector<Rotation> rotations_of(const Model& model);

}  // namespace qfilters::llama
