#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace qfilters {

/// Saved state as named parts of bytes: what a cache's save() gives, with
/// whatever its owner adds beside it (tokens, a sampler). restore() reads the
/// parts it knows and leaves the others alone. See snapshot_file.h for files.
///
/// Encoding, version 1, little-endian: "QFSNAP\r\n", u32 version, u64 number
/// of parts, for each u64 name length, name, u64 size, bytes; last the FNV-1a
/// 64 checksum of all before it, which finds accidents, not attacks.
class Snapshot {
 public:
  static constexpr std::size_t kMostParts = 16384;
  static constexpr std::string_view kMagic = "QFSNAP\r\n";

  [[nodiscard]] bool has(std::string_view name) const {
    return parts_.find(name) != parts_.end();
  }

  /// Adds or replaces a part.
  void put(std::string name, std::vector<std::byte> bytes) {
    parts_.insert_or_assign(std::move(name), std::move(bytes));
  }

  /// The same for numbers, as they lie in memory.
  template <typename T>
  requires std::is_arithmetic_v<T>

  void put_values(std::string name, std::span<const T> values) {
    const auto bytes = std::as_bytes(values);
    put(std::move(name), {bytes.begin(), bytes.end()});
  }

  void put_text(std::string name, std::string_view text) {
    put_values<char>(std::move(name), text);
  }

  /// A part's bytes, owned by the snapshot. Throws Error kFile naming a part
  /// that is missing.
  [[nodiscard]] std::span<const std::byte> bytes(std::string_view name) const;

  /// A part as numbers. Throws Error kFile also when its size does not divide.
  template <typename T>
  requires std::is_arithmetic_v<T>

  [[nodiscard]] std::vector<T> values(std::string_view name) const {
    const auto from = bytes(name);
    check_size(name, from.size(), sizeof(T));
    std::vector<T> out(from.size() / sizeof(T));
    if (!out.empty()) std::memcpy(out.data(), from.data(), from.size());
    return out;
  }

  [[nodiscard]] std::string text(std::string_view name) const {
    const auto chars = values<char>(name);
    return {chars.begin(), chars.end()};
  }

  /// Throws Error kInvalidArgument for more than kMostParts. O(bytes).
  [[nodiscard]] std::vector<std::byte> encode() const;

  /// Throws Error kFile for what is no snapshot, cut short or damaged, and
  /// kUnsupported for another version. Sizes are checked before anything is
  /// allocated: memory stays within the input's size and 4 MiB.
  [[nodiscard]] static Snapshot decode(std::span<const std::byte> encoded);

  /// Whether bytes begin as an encoded snapshot does.
  [[nodiscard]] static bool begins(std::span<const std::byte> bytes) noexcept;

  friend bool operator==(const Snapshot&, const Snapshot&) = default;

 private:
  static void check_size(
      std::string_view name, std::size_t size, std::size_t each);

  std::map<std::string, std::vector<std::byte>, std::less<>> parts_;
};

}  // namespace qfilters
