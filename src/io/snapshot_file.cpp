#include "qfilters/snapshot_file.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <system_error>
#include <vector>

#include "qfilters/atomic_file.h"
#include "qfilters/error.h"

#include "io/input_file.h"

namespace qfilters {
namespace {

namespace fs = std::filesystem;

std::vector<std::byte> read_file(const fs::path& path) {
  io::InputFile file(path);
  // What is no snapshot is not read as a whole, however large it is.
  std::vector<std::byte> bytes(
      std::min<std::size_t>(file.size(), Snapshot::kMagic.size()));
  file.read(bytes.data(), bytes.size());
  if (!Snapshot::begins(bytes)) return bytes;
  const std::size_t begun = bytes.size();
  bytes.resize(file.size());
  file.read(bytes.data() + begun, bytes.size() - begun);
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
    return Snapshot::decode(read_file(path));
  } catch (const Error& cause) {
    throw Error(cause.kind(), name + cause.what());
  }
}

}  // namespace qfilters
