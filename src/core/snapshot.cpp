#include "qfilters/snapshot.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "qfilters/error.h"
#include "qfilters/fingerprint.h"

#include "core/byte_io.h"

namespace qfilters {
namespace {

constexpr std::uint32_t kVersion = 1;

std::uint64_t checksum(std::span<const std::byte> bytes) {
  Fingerprint sum;
  sum.add(bytes);
  return sum.value();
}

}  // namespace

std::span<const std::byte> Snapshot::bytes(std::string_view name) const {
  const auto found = parts_.find(name);
  if (found == parts_.end()) {
    throw Error(
        ErrorKind::kFile,
        "snapshot: it has no part '" + std::string(name) + "'");
  }
  return found->second;
}

void Snapshot::check_size(
    std::string_view name, std::size_t size, std::size_t each) {
  if (size % each == 0) return;
  throw Error(
      ErrorKind::kFile,
      "snapshot: part '" + std::string(name) + "' of " + std::to_string(size) +
          " bytes does not hold values of " + std::to_string(each));
}

bool Snapshot::begins(std::span<const std::byte> bytes) noexcept {
  return bytes.size() >= kMagic.size() &&
         std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) == 0;
}

std::vector<std::byte> Snapshot::encode() const {
  if (parts_.size() > kMostParts) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "snapshot: " + std::to_string(parts_.size()) + " parts exceed " +
            std::to_string(kMostParts));
  }
  ByteWriter out;
  out.put_array<char>(kMagic);
  out.put(kVersion);
  out.put(std::uint64_t{parts_.size()});
  for (const auto& [name, bytes] : parts_) {
    out.put_text(name);
    out.put(std::uint64_t{bytes.size()});
    out.put_array<std::byte>(bytes);
  }
  out.put(checksum(out.bytes()));
  return out.take();
}

Snapshot Snapshot::decode(std::span<const std::byte> encoded) {
  ByteReader in(encoded);
  if (!begins(encoded)) {
    throw Error(ErrorKind::kFile, "snapshot: this is no snapshot");
  }
  static_cast<void>(in.get_array<char>(kMagic.size()));
  const auto version = in.get<std::uint32_t>();
  if (version != kVersion) {
    throw Error(
        ErrorKind::kUnsupported,
        "snapshot: version " + std::to_string(version) +
            "; this build reads version " + std::to_string(kVersion));
  }
  constexpr std::size_t kSum = sizeof(std::uint64_t);
  if (in.left() < kSum || ByteReader(encoded.last(kSum)).get<std::uint64_t>() !=
                              checksum(encoded.first(encoded.size() - kSum))) {
    throw Error(
        ErrorKind::kFile,
        "snapshot: the checksum is wrong; it is cut short or damaged");
  }
  Snapshot out;
  const auto count = in.get<std::uint64_t>();
  if (count > kMostParts) {
    throw Error(
        ErrorKind::kFile,
        "snapshot: " + std::to_string(count) + " parts exceed " +
            std::to_string(kMostParts));
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    std::string name = in.get_text();
    const auto size = in.get<std::uint64_t>();
    out.put(std::move(name), in.get_array<std::byte>(size));
  }
  static_cast<void>(in.get<std::uint64_t>());
  in.finish();
  return out;
}

}  // namespace qfilters
