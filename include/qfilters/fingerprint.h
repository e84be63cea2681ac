#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace qfilters {

/// Identity of data: FNV-1a with 64 bits (RFC 9923). Finds accidents, not
/// attacks. The same bytes give the same value however they are split.
class Fingerprint {
 public:
  void add(std::span<const std::byte> bytes) noexcept {
    for (const std::byte byte : bytes) {
      add_byte(std::to_integer<std::uint64_t>(byte));
    }
  }

  void add(std::string_view text) noexcept {
    add(std::as_bytes(std::span(text.data(), text.size())));
  }

  /// An integer as its little-endian bytes, on every machine.
  template <std::integral T>
  void add(T integer) noexcept {
    const auto bits = static_cast<std::uint64_t>(integer);
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      add_byte((bits >> (8 * i)) & 0xFFU);
    }
  }

  [[nodiscard]] std::uint64_t value() const noexcept { return value_; }

  /// 16 lower-case hexadecimal digits.
  [[nodiscard]] std::string hex() const {
    constexpr std::string_view kDigits = "0123456789abcdef";
    std::string out(16, '0');
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = kDigits[(value_ >> (60 - 4 * i)) & 0xFU];
    }
    return out;
  }

 private:
  void add_byte(std::uint64_t byte) noexcept {
    value_ = (value_ ^ byte) * std::uint64_t{0x00000100000001B3};
  }

  std::uint64_t value_ = 0xCBF29CE484222325;
};

}  // namespace qfilters
