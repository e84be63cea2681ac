#pragma once

#include <bit>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <type_traits>

namespace qfilters::io {

static_assert(
    std::endian::native == std::endian::little,
    "numbers and tensors are copied as they lie in the file");

/// Throws Error kFile.
[[noreturn]] void fail(const std::string& reason);

/// A file read from front to back. It knows what is left of it, so that every
/// claimed size can be checked before anything is allocated for it.
class InputFile {
 public:
  explicit InputFile(const std::filesystem::path& path);

  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }

  [[nodiscard]] std::uint64_t left() const noexcept { return left_; }

  // All of these throw Error kFile for more bytes than are left.

  void read(void* to, std::uint64_t bytes);
  void skip(std::uint64_t bytes);
  [[nodiscard]] std::string text(std::uint64_t bytes);

  /// A number, little-endian.
  template <typename T>
  [[nodiscard]] T get() {
    static_assert(std::is_arithmetic_v<T>);
    T value{};
    read(&value, sizeof value);
    return value;
  }

 private:
  void take(std::uint64_t bytes);
  void check() const;

  std::ifstream file_;
  std::uint64_t size_ = 0;
  std::uint64_t left_ = 0;
};

}  // namespace qfilters::io
