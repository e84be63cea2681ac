// SequenceCache::restore(): refuses foreign bytes and stays as it was, or
// continues as any other sequence.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "qfilters/error.h"
#include "qfilters/sequence_cache.h"

#include "fuzz/require.h"
#include "fuzz/sealed.h"
#include "fuzz/small_caches.h"

namespace qfilters::fuzz {
namespace {

bool restores(SequenceCache& cache, const Snapshot& saved) {
  try {
    cache.restore(saved);
    return true;
  } catch (const Error& error) {
    require(
        error.kind() == ErrorKind::kFile ||
            error.kind() == ErrorKind::kMismatch,
        error.what());
  }
  require(
      cache.offset() == 0 && cache.stats().kv_bytes == 0,
      "a refused snapshot has left something behind");
  return false;
}

void check(std::string_view policy, RowFormat format, const Snapshot& foreign) {
  SequenceCache cache = small_sequence(policy, format);
  if (!restores(cache, foreign)) return;
  SequenceCache twin = small_sequence(policy, format);
  require(restores(twin, cache.save()), "its own snapshot is refused");
  if (!can_continue(cache.offset())) return;
  for (const std::size_t tokens : kUpdates) {
    update(cache, tokens);
    update(twin, tokens);
  }
  require(cache.save() == twin.save(), "a snapshot changes what follows");
}

}  // namespace
}  // namespace qfilters::fuzz

extern "C" int LLVMFuzzerTestOneInput(
    const std::uint8_t* data, std::size_t size) {
  const auto foreign =
      qfilters::fuzz::decode_unsealed(std::as_bytes(std::span(data, size)));
  if (!foreign) return 0;
  for (const std::string_view policy : qfilters::fuzz::kPolicies) {
    for (const qfilters::RowFormat format : qfilters::fuzz::kFormats)
      qfilters::fuzz::check(policy, format, *foreign);
  }
  return 0;
}
