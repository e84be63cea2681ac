// load_filters() on foreign bytes; QFILTERS_FUZZ_EXTENSION names the format.
// What it accepts must survive being saved.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include <fcntl.h>
#include <unistd.h>

#include "qfilters/error.h"
#include "qfilters/filter_file.h"

#include "fuzz/require.h"
#include "io/npz.h"

namespace qfilters::fuzz {
namespace {

/// A file for one process, rewritten for every input.
class ScratchFile {
 public:
  explicit ScratchFile(std::string_view extension)
      : path_(
            std::filesystem::temp_directory_path() /
            ("qfilters-fuzz-" + std::to_string(::getpid()) +
             std::string(extension))),
        file_(::open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600)) {}

  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  ~ScratchFile() {
    ::close(file_);
    ::unlink(path_.c_str());
  }

  const std::filesystem::path& write(std::string_view content) {
    require(
        ::ftruncate(file_, 0) == 0 &&
            ::pwrite(file_, content.data(), content.size(), 0) ==
                static_cast<ssize_t>(content.size()),
        "the scratch file cannot be written");
    return path_;
  }

 private:
  std::filesystem::path path_;
  int file_;
};

std::optional<FilterBank> load(const std::filesystem::path& path) {
  try {
    return load_filters(path);
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kFile, error.what());
    return std::nullopt;
  }
}

std::optional<std::string> encode(const FilterBank& filters) {
  try {
    return io::encode_npz(filters, FilterSign::kPositive);
  } catch (const Error& error) {
    require(
        std::string_view(error.what()) == "its metadata is too long",
        error.what());
    return std::nullopt;
  }
}

void check(std::string_view content) {
  static ScratchFile foreign(QFILTERS_FUZZ_EXTENSION);
  static ScratchFile own(".own.npz");
  const auto filters = load(foreign.write(content));
  if (!filters) return;
  const auto encoded = encode(*filters);
  if (!encoded) return;
  require(load(own.write(*encoded)) == filters, "saving changes the filters");
}

}  // namespace
}  // namespace qfilters::fuzz

extern "C" int LLVMFuzzerTestOneInput(
    const std::uint8_t* data, std::size_t size) {
  qfilters::fuzz::check({reinterpret_cast<const char*>(data), size});
  return 0;
}
