// qf_cache: a QFiltersKVCache and the rows of its last update.
#include <algorithm>
#include <utility>
#include <vector>

#include "c_api/support.h"

namespace c_api = qfilters::c_api;

using qfilters::Config;
using qfilters::Error;
using qfilters::ErrorKind;
using qfilters::Inputs;
using qfilters::QFiltersKVCache;
using qfilters::RowShape;
using qfilters::RowsView;

struct qf_cache {
  QFiltersKVCache cache;
  // What the last update returned, until something invalidates it.
  std::optional<RowsView> rows;
};

namespace {

constexpr const char* kOnLowRetention[] = {"warn", "raise", "ignore"};

qf_config default_config() {
  const Config config;
  return {
      sizeof(qf_config),
      config.qfilters_budget,
      config.qfilters_n_sink,
      config.qfilters_recent,
      config.qfilters_interval,
      config.qfilters_calib_tokens,
      config.qfilters_sign,
      config.qfilters_min_retention.value_or(0),
      QF_ON_LOW_RETENTION_WARN};
}

Config config_of(const qf_config* given) {
  const qf_config c = c_api::read_struct(given, default_config());
  if (c.on_low_retention < QF_ON_LOW_RETENTION_WARN ||
      c.on_low_retention > QF_ON_LOW_RETENTION_IGNORE) {
    c_api::reject(
        "on_low_retention " + std::to_string(c.on_low_retention) +
        " is unknown");
  }
  Config config;
  config.qfilters_budget = c.budget;
  config.qfilters_n_sink = c.n_sink;
  config.qfilters_recent = c.recent;
  config.qfilters_interval = c.interval;
  config.qfilters_calib_tokens = c.calib_tokens;
  config.qfilters_sign = c.sign;
  config.qfilters_min_retention = c.min_retention;
  if (c.min_retention == 0) config.qfilters_min_retention.reset();
  config.qfilters_on_low_retention = kOnLowRetention[c.on_low_retention];
  return config;
}

QFiltersKVCache make_cache(
    const Config& config, const qf_filters* filters, std::size_t layer) {
  if (filters == nullptr) return QFiltersKVCache(config);
  return {config, filters->bank->layer(layer)};
}

const RowsView& fetched(const qf_cache* cache) {
  const std::optional<RowsView>& rows = c_api::deref(cache, "cache").rows;
  if (!rows) c_api::reject("no update, or it has been settled");
  return *rows;
}

// Ends qf_cache_attend(); for calls whose arguments are found to be fine.
QFiltersKVCache& settled(qf_cache& cache) {
  cache.cache.settle();
  cache.rows.reset();
  return cache.cache;
}

void update(
    qf_cache* cache,
    const qf_tensor* keys,
    const qf_tensor* values,
    Inputs inputs) {
  qf_cache& c = c_api::deref(cache, "cache");
  const auto k = c_api::view_of(keys, "keys");
  const auto v = c_api::view_of(values, "values");
  std::optional<RowsView> before = std::exchange(c.rows, std::nullopt);
  try {
    c.rows = c.cache.update_and_fetch(k, v, inputs);
  } catch (const Error& error) {
    // All others come before anything changes (kv_cache.h).
    if (error.kind() != ErrorKind::kLowRetention) c.rows = before;
    throw;
  }
}

// Without rows to attend over there is nothing that settling takes away.
const RowShape& shape_of(qf_cache& cache) {
  return cache.rows ? cache.rows->shape() : cache.cache.stored().shape();
}

// The cache behind a handle that has this group.
qf_cache& with_group(qf_cache* cache, std::size_t group) {
  c_api::check_group(shape_of(c_api::deref(cache, "cache")), group);
  return *cache;
}

}  // namespace

qf_status qf_config_init(qf_config* config, size_t struct_size) {
  return c_api::guard(__func__, [&] {
    c_api::write_struct(config, "config", struct_size, default_config());
  });
}

qf_status qf_cache_create(
    const qf_config* config,
    const qf_filters* filters,
    size_t layer,
    qf_cache** out) {
  return c_api::guard(__func__, [&] {
    c_api::deref(out, "out");
    *out = new qf_cache{make_cache(config_of(config), filters, layer), {}};
  });
}

void qf_cache_free(qf_cache* cache) {
  delete cache;
}

qf_status qf_cache_update(
    qf_cache* cache, const qf_tensor* keys, const qf_tensor* values) {
  return c_api::guard(
      __func__, [&] { update(cache, keys, values, Inputs::kCopied); });
}

qf_status qf_cache_update_borrowed(
    qf_cache* cache, const qf_tensor* keys, const qf_tensor* values) {
  return c_api::guard(
      __func__, [&] { update(cache, keys, values, Inputs::kBorrowed); });
}

qf_status qf_cache_attend(
    const qf_cache* cache,
    const qf_tensor* queries,
    const qf_attention* options,
    const qf_output* out) {
  return c_api::guard(__func__, [&] {
    c_api::attend_to(fetched(cache), queries, options, out);
  });
}

qf_status qf_cache_fetched_positions(
    const qf_cache* cache,
    size_t group,
    int32_t* out,
    size_t capacity,
    size_t* size) {
  return c_api::guard(__func__, [&] {
    const RowsView& rows = fetched(cache);
    c_api::check_group(rows.shape(), group);
    const std::size_t count = rows.rows(group);
    if (!c_api::wants(count, out, capacity, size)) return;
    for (std::size_t r = 0; r < count; ++r) {
      out[r] = rows.position(group, r);
    }
  });
}

qf_status qf_cache_fetched_keys(
    const qf_cache* cache,
    size_t group,
    uint16_t* out,
    size_t capacity,
    size_t* size) {
  return c_api::guard(__func__, [&] {
    c_api::copy_keys(fetched(cache), group, out, capacity, size);
  });
}

qf_status qf_cache_fetched_values(
    const qf_cache* cache,
    size_t group,
    uint16_t* out,
    size_t capacity,
    size_t* size) {
  return c_api::guard(__func__, [&] {
    c_api::copy_values(fetched(cache), group, out, capacity, size);
  });
}

qf_status qf_cache_settle(qf_cache* cache) {
  return c_api::guard(__func__, [&] { settled(c_api::deref(cache, "cache")); });
}

qf_status qf_cache_positions(
    qf_cache* cache,
    size_t group,
    int32_t* out,
    size_t capacity,
    size_t* size) {
  return c_api::guard(__func__, [&] {
    qf_cache& c = with_group(cache, group);
    if (!c_api::wants(c.cache.tokens_kept(), out, capacity, size)) return;
    std::ranges::copy(settled(c).positions(group), out);
  });
}

qf_status qf_cache_scores(
    qf_cache* cache, size_t group, float* out, size_t capacity, size_t* size) {
  return c_api::guard(__func__, [&] {
    qf_cache& c = with_group(cache, group);
    if (!c_api::wants(c.cache.tokens_kept(), out, capacity, size)) return;
    std::ranges::copy(settled(c).scores(group), out);
  });
}

qf_status qf_cache_keys(
    qf_cache* cache,
    size_t group,
    uint16_t* out,
    size_t capacity,
    size_t* size) {
  return c_api::guard(__func__, [&] {
    qf_cache& c = with_group(cache, group);
    const std::size_t count = c.cache.tokens_kept() * shape_of(c).key_dim;
    if (!c_api::wants(count, out, capacity, size)) return;
    c_api::copy_keys(settled(c).stored(), group, out, capacity, size);
  });
}

qf_status qf_cache_values(
    qf_cache* cache,
    size_t group,
    uint16_t* out,
    size_t capacity,
    size_t* size) {
  return c_api::guard(__func__, [&] {
    qf_cache& c = with_group(cache, group);
    const std::size_t count = c.cache.tokens_kept() * shape_of(c).value_dim;
    if (!c_api::wants(count, out, capacity, size)) return;
    c_api::copy_values(settled(c).stored(), group, out, capacity, size);
  });
}

qf_status qf_cache_filter(
    const qf_cache* cache,
    size_t group,
    float* out,
    size_t capacity,
    size_t* size) {
  return c_api::guard(__func__, [&] {
    const QFiltersKVCache& c = c_api::deref(cache, "cache").cache;
    c_api::copy_out<float>(c.filter(group), out, capacity, size);
  });
}

qf_status qf_cache_get_stats(
    qf_cache* cache, qf_cache_stats* out, size_t struct_size) {
  return c_api::guard(__func__, [&] {
    qf_cache& c = c_api::deref(cache, "cache");
    qf_cache_stats stats{};
    if (!c.cache.empty()) {
      const RowShape& shape = shape_of(c);
      stats.batch = shape.batch;
      stats.kv_heads = shape.kv_heads;
      stats.key_dim = shape.key_dim;
      stats.value_dim = shape.value_dim;
      stats.dtype =
          shape.dtype == qfilters::DType::kFloat16 ? QF_FLOAT16 : QF_BFLOAT16;
    }
    stats.offset = c.cache.offset();
    stats.tokens_kept = c.cache.tokens_kept();
    stats.tokens_seen = c.cache.tokens_seen();
    stats.kept_bytes = c.cache.qfilters_kept_bytes();
    stats.full_bytes = c.cache.full_seq_bytes();
    stats.row_bytes = c.cache.nbytes();
    stats.non_finite_scores = c.cache.non_finite_scores();
    stats.compression_ratio = c.cache.compression_ratio();
    c_api::write_struct(out, "out", struct_size, stats);
  });
}

// A buffer takes three arguments. NOLINTNEXTLINE(readability-function-size)
qf_status qf_cache_make_mask(
    qf_cache* cache,
    size_t tokens,
    int32_t return_array,
    size_t window,
    qf_mask* mask,
    uint8_t* allowed,
    size_t capacity,
    size_t* size) {
  return c_api::guard(__func__, [&] {
    qf_cache& c = c_api::deref(cache, "cache");
    c_api::deref(mask, "mask");
    c_api::check_buffer(allowed, capacity, size);
    const auto made = c.cache.make_mask(tokens, return_array != 0, window);
    using Kind = qfilters::AttentionMask::Kind;
    if (made.kind == Kind::kArray) c.rows.reset();  // it has settled
    c_api::copy_out<std::uint8_t>(made.allowed, allowed, capacity, size);
    const std::int32_t kind =
        made.kind == Kind::kNone
            ? QF_MASK_NONE
            : (made.kind == Kind::kCausal ? QF_MASK_CAUSAL : QF_MASK_ARRAY);
    *mask = {kind, made.batch, made.queries, made.keys};
  });
}

qf_status qf_cache_save(
    qf_cache* cache, void* out, size_t capacity, size_t* size) {
  return c_api::guard(__func__, [&] {
    qf_cache& c = c_api::deref(cache, "cache");
    auto* const bytes = static_cast<std::byte*>(out);
    c_api::check_buffer(bytes, capacity, size);
    const auto saved = settled(c).save().encode();
    c_api::copy_out<std::byte>(saved, bytes, capacity, size);
  });
}

qf_status qf_cache_restore(qf_cache* cache, const void* saved, size_t size) {
  return c_api::guard(__func__, [&] {
    qf_cache& c = c_api::deref(cache, "cache");
    c.cache.restore(qfilters::Snapshot::decode(c_api::bytes_of(saved, size)));
    c.rows.reset();
  });
}

qf_status qf_cache_on_warning(
    qf_cache* cache, qf_warning_handler handler, void* user) {
  return c_api::guard(__func__, [&] {
    QFiltersKVCache& c = c_api::deref(cache, "cache").cache;
    if (handler == nullptr) return c.on_warning(nullptr);
    c.on_warning([handler, user](std::string_view message) {
      handler(user, std::string(message).c_str());
    });
  });
}
