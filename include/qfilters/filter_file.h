#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "qfilters/filter_bank.h"

namespace qfilters {

/// Reads filters; the extension chooses the format: `.npz` (version 1 of the
/// reference system, `layer_0`, `layer_1`, ... plus `__meta__`) or
/// `.safetensors` (one float32 tensor `q_filters` [layers, heads, dim], stored
/// negated as the published `_qfilt` files are). Signs are normalised: larger
/// projection = keep. Sizes are checked against the file before anything is
/// allocated. Throws Error kFile with the path and the reason, and kMismatch
/// when an expected model_id is given that is not the file's ("" if it has
/// none).
[[nodiscard]] FilterBank load_filters(
    const std::filesystem::path& path,
    const std::optional<std::string>& expect_model_id = std::nullopt);

/// Writes filters in the format of the extension, atomically: the named file
/// appears whole or not at all. Throws Error kFile, or kShape when the format
/// cannot hold layers of different shapes (safetensors).
void save_filters(const FilterBank& filters, const std::filesystem::path& path);

}  // namespace qfilters
