// save() and restore() of a QFiltersKVCache.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "qfilters/error.h"
#include "qfilters/kv_cache.h"

#include "core/byte_io.h"
#include "core/kv_cache_state.h"
#include "core/sequence_layer.h"

namespace qfilters {

namespace {

constexpr const char* kPart = "cache";

// What a saved cache must have in common with the one that continues it.
std::vector<std::string> identity(
    const Config& config, const LayerFilters* calibrated) {
  const auto number = [](const char* name, std::int64_t value) {
    return std::string(name) + " " + std::to_string(value);
  };
  const auto& floor = config.qfilters_min_retention;
  std::vector<std::string> words = {
      number("qfilters_budget", config.qfilters_budget),
      number("qfilters_n_sink", config.qfilters_n_sink),
      number("qfilters_recent", config.qfilters_recent),
      number("qfilters_interval", config.qfilters_interval),
      number("qfilters_sign", config.qfilters_sign),
      "qfilters_min_retention " + (floor ? std::to_string(*floor) : "none"),
      "qfilters_on_low_retention " + config.qfilters_on_low_retention};
  if (calibrated != nullptr) {
    const FilterBank bank({*calibrated}, FilterMetadata{});
    words.push_back("filters " + bank.fingerprint());
  } else {
    words.push_back(number(
        "filters from keys, qfilters_calib_tokens",
        config.qfilters_calib_tokens));
  }
  return words;
}

}  // namespace

Snapshot QFiltersKVCache::save() {
  State& s = *state_;
  s.settle();
  ByteWriter out;
  for (const std::string& word :
       identity(s.config, s.calibrated ? &*s.filters : nullptr)) {
    out.put_text(word);
  }
  out.put(s.full_bytes);
  out.put(s.seen);
  out.put(s.retention_fired);
  out.put(s.sequence != nullptr);
  Snapshot snapshot;
  if (s.sequence != nullptr) {
    const RowShape& shape = s.sequence->store(0).shape();
    out.put(shape.dtype);
    for (const std::size_t size :
         {shape.batch, shape.kv_heads, shape.key_dim, shape.value_dim}) {
      out.put(std::uint64_t{size});
    }
    const bool frozen = !s.calibrated && s.filters.has_value();
    out.put(frozen);
    if (frozen) out.put_array<float>(s.filters->values);
    snapshot = s.sequence->save();
  }
  snapshot.put(kPart, out.take());
  return snapshot;
}

void QFiltersKVCache::restore(const Snapshot& saved) {
  ByteReader in(saved.bytes(kPart));
  const LayerFilters* calibrated =
      state_->calibrated ? &*state_->filters : nullptr;
  for (const std::string& word : identity(state_->config, calibrated)) {
    const std::string found = in.get_text();
    if (found != word) {
      throw Error(
          ErrorKind::kMismatch,
          "restore: the saved cache has '" + found + "', this one has '" +
              word + "'");
    }
  }
  // Built aside, so that a failure leaves this cache as it was.
  QFiltersKVCache next = calibrated != nullptr
                             ? QFiltersKVCache(state_->config, *calibrated)
                             : QFiltersKVCache(state_->config);
  State& s = *next.state_;
  s.warn = state_->warn;
  s.full_bytes = in.get<std::uint64_t>();
  s.seen = in.get<std::uint64_t>();
  s.retention_fired = in.get<std::uint8_t>() != 0;
  if (in.get<std::uint8_t>() != 0) {
    s.start_restored(in, saved.bytes(kSequencePart).size());
    s.sequence->restore(saved);
    s.offset = s.sequence->offset();
  }
  in.finish();
  s.check_restored();
  *this = std::move(next);
}

void QFiltersKVCache::State::start_restored(
    ByteReader& in, std::size_t row_bytes) {
  RowShape shape;
  shape.dtype = in.get<DType>();
  for (std::size_t* size :
       {&shape.batch, &shape.kv_heads, &shape.key_dim, &shape.value_dim}) {
    *size = in.get<std::uint64_t>();
  }
  // Every (batch, head) takes at least its number of rows, which keeps
  // allocations small.
  if (!shape.valid() || shape.groups() > row_bytes / sizeof(std::uint64_t)) {
    throw Error(
        ErrorKind::kFile, "restore: the shape of the cache makes no sense");
  }
  const auto like = [&](std::size_t dim) {
    return TensorView::dense(
        nullptr, shape.dtype, shape.batch, shape.kv_heads, 0, dim);
  };
  check(like(shape.key_dim), like(shape.value_dim));
  start(like(shape.key_dim), like(shape.value_dim));
  if (in.get<std::uint8_t>() == 0) return;
  if (calibrated) {
    throw Error(ErrorKind::kFile, "restore: filters where there must be none");
  }
  freeze(
      {groups(), shape.key_dim, in.get_array<float>(groups() * shape.key_dim)});
}

// Every group holds as many rows as updates leave, or later code would trip.
void QFiltersKVCache::State::check_restored() const {
  const std::uint64_t rows_seen = sequence ? groups() * offset : 0;
  bool sound = seen == rows_seen;
  if (sequence) {
    const KVStore& store = sequence->store(0);
    const std::size_t rows = store.rows(0);
    const std::size_t least =
        policy.bounded() ? std::min(offset, policy.options().budget) : offset;
    sound = sound && full_bytes == seen * store.shape().row_bytes() &&
            rows >= least && rows == policy.rows_after_commit(rows);
    for (std::size_t g = 1; g < groups(); ++g) {
      sound = sound && store.rows(g) == rows;
    }
  }
  if (!sound || (!sequence && full_bytes != 0)) {
    throw Error(
        ErrorKind::kFile, "restore: the rows and the counters make no sense");
  }
}

}  // namespace qfilters
