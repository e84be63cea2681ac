#include "qfilters/filter_file.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "qfilters/atomic_file.h"
#include "qfilters/error.h"

#include "io/gguf.h"
#include "io/npz.h"
#include "io/safetensors.h"

namespace qfilters {
namespace {

namespace fs = std::filesystem;

struct Format {
  std::string_view extension;
  FilterSign usual_sign;
  FilterBank (*read)(const fs::path&);
  std::string (*encode)(const FilterBank&, FilterSign);
};

// A new format is one line here and a pair of files beside this one.
constexpr std::array kFormats = {
    Format{".npz", FilterSign::kPositive, io::read_npz, io::encode_npz},
    Format{
        ".safetensors",
        FilterSign::kNegated,
        io::read_safetensors,
        io::encode_safetensors},
    Format{".gguf", FilterSign::kPositive, io::read_gguf, io::encode_gguf},
};

const Format& format_of(const fs::path& path) {
  std::string extension = path.extension().string();
  std::transform(
      extension.begin(), extension.end(), extension.begin(), [](char c) {
        return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      });
  std::string known;
  for (const Format& format : kFormats) {
    if (format.extension == extension) return format;
    known += (known.empty() ? "" : ", ") + std::string(format.extension);
  }
  throw Error(
      ErrorKind::kFile,
      "the extension '" + extension + "' is none of a filter file: " + known);
}

}  // namespace

FilterBank load_filters(
    const fs::path& path, const FilterExpectation& expected) {
  const std::string name = "load_filters: '" + path.string() + "'";
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) {
    throw Error(
        ErrorKind::kFile,
        name + " does not exist; `qfilters calibrate` makes a filter file");
  }
  if (status.type() == fs::file_type::none) {
    throw Error(ErrorKind::kFile, name + ": " + error.message());
  }
  if (!fs::is_regular_file(status)) {
    throw Error(ErrorKind::kFile, name + " is not a regular file");
  }
  FilterBank filters = [&] {
    try {
      return format_of(path).read(path);
    } catch (const Error& cause) {
      throw Error(ErrorKind::kFile, name + ": " + cause.what());
    }
  }();
  try {
    check_origin(filters.metadata(), expected);
  } catch (const Error& cause) {
    throw Error(cause.kind(), name + ": " + cause.what());
  }
  return filters;
}

void save_filters(
    const FilterBank& filters,
    const fs::path& path,
    std::optional<FilterSign> sign) {
  std::string content;
  try {
    const Format& format = format_of(path);
    content = format.encode(filters, sign.value_or(format.usual_sign));
  } catch (const Error& cause) {
    throw Error(
        cause.kind(), "save_filters: '" + path.string() + "': " + cause.what());
  }
  write_file_atomically(path, content);
}

void check_filter_extension(const fs::path& path) {
  try {
    static_cast<void>(format_of(path));
  } catch (const Error& cause) {
    throw Error(
        cause.kind(),
        "check_filter_extension: '" + path.string() + "': " + cause.what());
  }
}

}  // namespace qfilters
