#pragma once

#include <filesystem>
#include <optional>

#include "qfilters/filter_bank.h"

namespace qfilters {

/// Which projections a file's numbers mark as worth keeping. In memory it is
/// always the larger ones: readers and writers turn the sign.
enum class FilterSign {
  kPositive,  ///< the larger ones
  kNegated,   ///< the smaller ones, as in the published `_qfilt` files
};

/// Reads filters; the extension chooses the format: `.npz` (version 1 of the
/// reference system), `.safetensors` (the layout of the published `_qfilt`
/// files) or `.gguf` (our own). docs/formats.md describes them. Rank, shape,
/// values and every size are checked, sizes before anything is allocated for
/// them: memory stays within 4 times the file's size and 4 MiB, whatever is in
/// it. Throws Error kFile with the path and the reason, and kMismatch when the
/// filters are not `expected` (see check_origin).
[[nodiscard]] FilterBank load_filters(
    const std::filesystem::path& path, const FilterExpectation& expected = {});

/// Writes filters in the format of the extension, atomically: the named file
/// appears whole or not at all. Without a sign it is the usual one of the
/// format: negated in .safetensors, positive in the others. Throws Error kFile,
/// kShape for layers of different shapes in .safetensors, and kInvalidArgument
/// for a negated .npz, which has no place to say so.
void save_filters(
    const FilterBank& filters,
    const std::filesystem::path& path,
    std::optional<FilterSign> sign = std::nullopt);

/// Throws Error kFile unless the extension is one of a filter file.
void check_filter_extension(const std::filesystem::path& path);

}  // namespace qfilters
