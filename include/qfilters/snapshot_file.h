#pragma once

#include <filesystem>

#include "qfilters/snapshot.h"

namespace qfilters {

/// Writes a snapshot, atomically: the named file appears whole or not at all.
/// Throws Error kFile.
void save_snapshot(const Snapshot& snapshot, const std::filesystem::path& path);

/// Throws Error kFile with the path and the reason for anything but an
/// undamaged snapshot, kUnsupported for one of another version. Takes twice
/// the file's size in memory.
[[nodiscard]] Snapshot load_snapshot(const std::filesystem::path& path);

}  // namespace qfilters
