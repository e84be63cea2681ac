#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

namespace qfilters {

/// Writes a whole file or nothing: a temporary file in the same folder, flushed
/// to disk, then renamed over `path`. A symbolic link stays one: the file that
/// it points to is made or replaced. Throws Error kFile with the path and the
/// system's reason; an existing file is untouched then.
void write_file_atomically(
    const std::filesystem::path& path, std::span<const std::byte> content);
void write_file_atomically(
    const std::filesystem::path& path, std::string_view content);

/// Throws Error kFile if `path` cannot be created or replaced, before hours of
/// work end in an error. Leaves nothing behind.
void check_writable(const std::filesystem::path& path);

}  // namespace qfilters
