#pragma once

#include <filesystem>
#include <string>

#include "qfilters/filter_bank.h"
#include "qfilters/filter_file.h"

namespace qfilters::io {

/// Reads the layout of the published `_qfilt` files: a float32 tensor
/// `q_filters` [layers, heads, dim], stored negated unless `__metadata__` has
/// "sign": "positive". Throws Error with the reason.
[[nodiscard]] FilterBank read_safetensors(const std::filesystem::path& path);

/// The bytes of such a file, our metadata in `__metadata__`. Throws Error
/// kShape for layers of different shapes, kFile for oversized metadata.
[[nodiscard]] std::string encode_safetensors(
    const FilterBank& filters, FilterSign sign);

}  // namespace qfilters::io
