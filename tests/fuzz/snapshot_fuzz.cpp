// Snapshot::decode() on foreign bytes; what it accepts survives encode().
#include <cstddef>
#include <cstdint>
#include <span>

#include "fuzz/require.h"
#include "fuzz/sealed.h"

extern "C" int LLVMFuzzerTestOneInput(
    const std::uint8_t* data, std::size_t size) {
  using namespace qfilters;
  const auto snapshot =
      fuzz::decode_unsealed(std::as_bytes(std::span(data, size)));
  if (!snapshot) return 0;
  fuzz::require(
      Snapshot::decode(snapshot->encode()) == *snapshot,
      "encoding changes a snapshot");
  return 0;
}
