#include "io/input_file.h"

#include <cstdint>
#include <filesystem>
#include <ios>
#include <string>
#include <system_error>

#include "qfilters/error.h"

namespace qfilters::io {

void fail(const std::string& reason) {
  throw Error(ErrorKind::kFile, reason);
}

InputFile::InputFile(const std::filesystem::path& path)
    : file_(path, std::ios::binary) {
  std::error_code error;
  size_ = std::filesystem::file_size(path, error);
  if (error || !file_) fail("it cannot be opened");
  left_ = size_;
}

void InputFile::read(void* to, std::uint64_t bytes) {
  take(bytes);
  file_.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
  check();
}

void InputFile::skip(std::uint64_t bytes) {
  constexpr std::uint64_t kSeekBytes = 4096;  // seeking drops the buffer
  take(bytes);
  const auto step = static_cast<std::streamsize>(bytes);
  if (bytes < kSeekBytes) {
    file_.ignore(step);
  } else {
    file_.seekg(step, std::ios::cur);
  }
  check();
}

std::string InputFile::text(std::uint64_t bytes) {
  if (bytes > left_) take(bytes);  // before it is allocated
  std::string text(bytes, '\0');
  read(text.data(), bytes);
  return text;
}

void InputFile::take(std::uint64_t bytes) {
  if (bytes > left_) {
    fail(
        "it is truncated: " + std::to_string(bytes) +
        " bytes are to be read where " + std::to_string(left_) + " are left");
  }
  left_ -= bytes;
}

void InputFile::check() const {
  if (!file_) fail("it ends too early or cannot be read");
}

}  // namespace qfilters::io
