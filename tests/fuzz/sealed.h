#pragma once

// The checksum at the end of a snapshot would turn away nearly every input, so
// targets get snapshots without it and add the one that fits.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "qfilters/error.h"
#include "qfilters/fingerprint.h"
#include "qfilters/snapshot.h"

#include "fuzz/require.h"

namespace qfilters::fuzz {

inline constexpr std::size_t kChecksumBytes = sizeof(std::uint64_t);

/// What a target is given for a snapshot.
inline std::vector<std::byte> unsealed(const Snapshot& snapshot) {
  std::vector<std::byte> bytes = snapshot.encode();
  bytes.resize(bytes.size() - kChecksumBytes);
  return bytes;
}

/// The snapshot that foreign bytes encode, if they do.
inline std::optional<Snapshot> decode_unsealed(
    std::span<const std::byte> foreign) {
  Fingerprint sum;
  sum.add(foreign);
  const std::uint64_t checksum = sum.value();
  std::vector<std::byte> sealed(foreign.begin(), foreign.end());
  const auto end = std::as_bytes(std::span(&checksum, 1));
  sealed.insert(sealed.end(), end.begin(), end.end());
  try {
    return Snapshot::decode(sealed);
  } catch (const Error& error) {
    require(
        error.kind() == ErrorKind::kFile ||
            error.kind() == ErrorKind::kUnsupported,
        error.what());
    return std::nullopt;
  }
}

}  // namespace qfilters::fuzz
