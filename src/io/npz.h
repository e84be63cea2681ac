#pragma once

#include <filesystem>
#include <string>

#include "qfilters/filter_bank.h"
#include "qfilters/filter_file.h"

namespace qfilters::io {

/// Reads version 1 of the reference system's `.npz`: `__meta__` (a JSON text)
/// and `layer_0`, `layer_1`, ... [heads, dim] of any number type, byte and axis
/// order, stored or deflated; other members are ignored. The filters take at
/// most four times the file's size (or 1 MiB). Throws Error with the reason.
[[nodiscard]] FilterBank read_npz(const std::filesystem::path& path);

/// The bytes of such a file, as numpy's `savez` lays its members out. The same
/// filters give the same bytes. Throws Error kFile for oversized metadata,
/// kInvalidArgument for another sign than positive.
[[nodiscard]] std::string encode_npz(
    const FilterBank& filters, FilterSign sign);

}  // namespace qfilters::io
