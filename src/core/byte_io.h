#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "qfilters/error.h"

namespace qfilters {

// Snapshots hold integers and floats as they lie in memory.
static_assert(std::endian::native == std::endian::little);

/// Appends values to a byte buffer, little-endian.
class ByteWriter {
 public:
  template <typename T>
  void put(const T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    put_bytes(std::as_bytes(std::span(&value, 1)));
  }

  template <typename T>
  void put_array(std::span<const T> values) {
    static_assert(std::is_arithmetic_v<T> || std::is_same_v<T, std::byte>);
    put_bytes(std::as_bytes(values));
  }

  void put_text(std::string_view text) {
    put(std::uint64_t{text.size()});
    put_bytes(std::as_bytes(std::span(text.data(), text.size())));
  }

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
    return bytes_;
  }

  [[nodiscard]] std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void put_bytes(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }

  std::vector<std::byte> bytes_;
};

/// Reads what ByteWriter wrote. Every size is checked against what is left
/// before anything is allocated; throws Error kFile.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  [[nodiscard]] T get() {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    T value{};
    std::memcpy(&value, next(sizeof(T)).data(), sizeof(T));
    return value;
  }

  template <typename T>
  [[nodiscard]] std::vector<T> get_array(std::uint64_t count) {
    if (count > bytes_.size() / sizeof(T)) fail();
    std::vector<T> values(static_cast<std::size_t>(count));
    const auto from = next(values.size() * sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), from.data(), from.size());
    return values;
  }

  [[nodiscard]] std::string get_text() {
    const auto size = get<std::uint64_t>();
    if (size > bytes_.size()) fail();
    const auto from = next(static_cast<std::size_t>(size));
    return {reinterpret_cast<const char*>(from.data()), from.size()};
  }

  [[nodiscard]] std::size_t left() const noexcept { return bytes_.size(); }

  /// Takes all that is left.
  [[nodiscard]] std::span<const std::byte> rest() noexcept {
    return std::exchange(bytes_, {});
  }

  /// Throws unless everything has been read.
  void finish() const {
    if (!bytes_.empty()) fail();
  }

 private:
  [[noreturn]] static void fail() {
    throw Error(ErrorKind::kFile, "snapshot: the data is cut short or damaged");
  }

  std::span<const std::byte> next(std::size_t count) {
    if (count > bytes_.size()) fail();
    const auto out = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return out;
  }

  std::span<const std::byte> bytes_;
};

}  // namespace qfilters
