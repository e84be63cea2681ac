// QFiltersKVCache::restore(): refuses foreign bytes and stays as it was, or
// continues as any other cache.
#include <cstddef>
#include <cstdint>
#include <span>

#include "qfilters/error.h"
#include "qfilters/kv_cache.h"

#include "fuzz/require.h"
#include "fuzz/sealed.h"
#include "fuzz/small_caches.h"

namespace qfilters::fuzz {
namespace {

bool restores(QFiltersKVCache& cache, const Snapshot& saved) {
  try {
    cache.restore(saved);
    return true;
  } catch (const Error& error) {
    require(
        error.kind() == ErrorKind::kFile ||
            error.kind() == ErrorKind::kMismatch,
        error.what());
  }
  require(cache.empty(), "a refused snapshot has left something behind");
  return false;
}

void check_counters(QFiltersKVCache& cache) {
  std::uint64_t bytes = 0;
  const auto states = cache.states();
  for (const QFiltersState& state : states) {
    bytes += (state.keys.size() + state.values.size()) * sizeof(std::uint16_t);
  }
  require(cache.nbytes() == bytes, "nbytes differs from the rows held");
  require(
      cache.tokens_seen() == states.size() * cache.offset(),
      "tokens_seen differs from the offset");
}

void check(bool calibrated, const Snapshot& foreign) {
  QFiltersKVCache cache = small_cache(calibrated);
  if (!restores(cache, foreign)) return;
  QFiltersKVCache twin = small_cache(calibrated);
  require(restores(twin, cache.save()), "its own snapshot is refused");
  check_counters(cache);
  constexpr std::size_t kManyValues = 4096;  // of one token: slow to continue
  if (!can_continue(cache.offset()) ||
      (!cache.empty() &&
       cache.stored().shape().groups() * cache.stored().shape().row_bytes() >
           kManyValues)) {
    return;
  }
  for (const std::size_t tokens : kUpdates) {
    update(cache, tokens);
    update(twin, tokens);
  }
  check_counters(cache);
  require(cache.save() == twin.save(), "a snapshot changes what follows");
}

}  // namespace
}  // namespace qfilters::fuzz

extern "C" int LLVMFuzzerTestOneInput(
    const std::uint8_t* data, std::size_t size) {
  const auto foreign =
      qfilters::fuzz::decode_unsealed(std::as_bytes(std::span(data, size)));
  if (!foreign) return 0;
  for (const bool calibrated : {true, false}) {
    qfilters::fuzz::check(calibrated, *foreign);
  }
  return 0;
}
