#pragma once

#include <filesystem>
#include <string>

#include "qfilters/filter_bank.h"
#include "qfilters/filter_file.h"

namespace qfilters::io {

/// Reads our own layout of a GGUF file (version 3, little-endian): metadata
/// under `qfilters.*` and one F32 tensor `blk.<i>.q_filter` per layer, in
/// order, its dims [dim, heads] with dim contiguous. docs/formats.md names the
/// keys. Layers may differ in shape. Throws Error with the reason.
[[nodiscard]] FilterBank read_gguf(const std::filesystem::path& path);

/// The bytes of such a file. The same filters give the same bytes. Throws Error
/// kFile for oversized metadata.
[[nodiscard]] std::string encode_gguf(
    const FilterBank& filters, FilterSign sign);

}  // namespace qfilters::io
