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

#include "io/npz.h"
#include "io/safetensors.h"

namespace qfilters {
namespace {

namespace fs = std::filesystem;

struct Format {
  std::string_view extension;
  FilterBank (*read)(const fs::path&);
  std::string (*encode)(const FilterBank&);
};

// A new format is one line here and a pair of files beside this one.
constexpr std::array kFormats = {
    Format{".npz", io::read_npz, io::encode_npz},
    Format{".safetensors", io::read_safetensors, io::encode_safetensors},
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
    const fs::path& path, const std::optional<std::string>& expect_model_id) {
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
  const std::string& model_id = filters.metadata().model_id;
  if (expect_model_id && model_id != *expect_model_id) {
    throw Error(
        ErrorKind::kMismatch,
        name + " was calibrated on '" + model_id + "', expected '" +
            *expect_model_id + "'");
  }
  return filters;
}

void save_filters(const FilterBank& filters, const fs::path& path) {
  std::string content;
  try {
    content = format_of(path).encode(filters);
  } catch (const Error& cause) {
    throw Error(
        cause.kind(), "save_filters: '" + path.string() + "': " + cause.what());
  }
  write_file_atomically(path, content);
}

}  // namespace qfilters
