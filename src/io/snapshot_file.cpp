#include "qfilters/snapshot_file.h"

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include "qfilters/atomic_file.h"
#include "qfilters/error.h"

namespace qfilters {
namespace {

namespace fs = std::filesystem;

std::vector<std::byte> read_file(const fs::path& path, std::size_t size) {
  std::ifstream file(path, std::ios::binary);
  // What is no snapshot is not read as a whole, however large it is.
  std::vector<std::byte> bytes(std::min(size, Snapshot::kMagic.size()));
  file.read(
      reinterpret_cast<char*>(bytes.data()),
      static_cast<std::streamsize>(bytes.size()));
  if (!file || !Snapshot::begins(bytes)) return bytes;
  file.seekg(0);
  bytes.resize(size);
  file.read(
      reinterpret_cast<char*>(bytes.data()),
      static_cast<std::streamsize>(bytes.size()));
  if (file.bad() || static_cast<std::size_t>(file.gcount()) != bytes.size()) {
    throw Error(ErrorKind::kFile, "it cannot be read");
  }
  return bytes;
}

}  // namespace

void save_snapshot(const Snapshot& snapshot, const fs::path& path) {
  write_file_atomically(path, snapshot.encode());
}

Snapshot load_snapshot(const fs::path& path) {
  const std::string name = "load_snapshot: '" + path.string() + "': ";
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::is_regular_file(status)) {
    const bool missing = status.type() == fs::file_type::not_found;
    throw Error(
        ErrorKind::kFile,
        name + (missing ? "it does not exist" : "it is not a regular file"));
  }
  try {
    const auto size = static_cast<std::size_t>(fs::file_size(path));
    return Snapshot::decode(read_file(path, size));
  } catch (const Error& cause) {
    throw Error(cause.kind(), name + cause.what());
  } catch (const fs::filesystem_error& cause) {
    throw Error(ErrorKind::kFile, name + cause.code().message());
  }
}

}  // namespace qfilters
