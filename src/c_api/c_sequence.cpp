// qf_sequence: a SequenceCache.
#include <string>
#include <vector>

#include "qfilters/error.h"
#include "qfilters/policy.h"
#include "qfilters/sequence_cache.h"

#include "c_api/support.h"

namespace c_api = qfilters::c_api;

using qfilters::BudgetRule;
using qfilters::Error;
using qfilters::ErrorKind;
using qfilters::KVStore;
using qfilters::LayerShape;
using qfilters::Policy;
using qfilters::PolicyOptions;
using qfilters::RowFormat;
using qfilters::RowOrder;
using qfilters::SequenceCache;
using qfilters::SequenceOptions;

struct qf_sequence {
  SequenceCache cache;
};

namespace {

qf_sequence_config default_config() {
  const SequenceOptions options;
  const PolicyOptions policy;
  return {
      sizeof(qf_sequence_config),
      options.batch,
      QF_FLOAT16,
      options.threads,
      options.byte_limit,
      policy.budget,
      policy.protection.sinks,
      policy.protection.recent,
      policy.interval,
      policy.sign,
      policy.seed,
      QF_ROWS_TEMPORAL,
      QF_ROW_FORMAT_SAME,
      QF_RULE_UNIFORM,
      policy.floor,
      policy.block};
}

RowOrder order_of(std::int32_t order) {
  if (order == QF_ROWS_TEMPORAL) return RowOrder::kTemporal;
  if (order == QF_ROWS_SLOT) return RowOrder::kSlot;
  throw Error(
      ErrorKind::kInvalidArgument,
      "row_order=" + std::to_string(order) + " is none of the QF_ROWS_*");
}

BudgetRule rule_of(std::int32_t rule) {
  if (rule == QF_RULE_UNIFORM) return BudgetRule::kUniform;
  if (rule == QF_RULE_PER_LAYER) return BudgetRule::kPerLayer;
  if (rule == QF_RULE_SHARED) return BudgetRule::kShared;
  throw Error(
      ErrorKind::kInvalidArgument,
      "rule=" + std::to_string(rule) + " is none of the QF_RULE_*");
}

RowFormat format_of(std::int32_t format) {
  if (format == QF_ROW_FORMAT_SAME) return RowFormat::kSame;
  if (format == QF_ROW_FORMAT_INT8) return RowFormat::kInt8;
  throw Error(
      ErrorKind::kInvalidArgument,
      "row_format=" + std::to_string(format) +
          " is none of the QF_ROW_FORMAT_*");
}

std::vector<LayerShape> layers_of(const qf_layer* layers, std::size_t count) {
  if (count > 0) c_api::deref(layers, "layers");
  std::vector<LayerShape> out;
  for (const qf_layer& layer : std::span(layers, count)) {
    out.push_back(
        {layer.kv_heads, layer.key_dim, layer.value_dim, layer.window});
  }
  return out;
}

SequenceCache& cache_of(qf_sequence* sequence) {
  return c_api::deref(sequence, "sequence").cache;
}

const SequenceCache& cache_of(const qf_sequence* sequence) {
  return c_api::deref(sequence, "sequence").cache;
}

const KVStore& store_of(
    const qf_sequence* sequence, std::size_t layer, std::size_t group) {
  const KVStore& store = cache_of(sequence).store(layer);
  c_api::check_group(store.shape(), group);
  return store;
}

}  // namespace

qf_status qf_sequence_config_init(
    qf_sequence_config* config, size_t struct_size) {
  return c_api::guard(__func__, [&] {
    c_api::write_struct(config, "config", struct_size, default_config());
  });
}

qf_status qf_sequence_create(
    const qf_layer* layers,
    size_t count,
    const char* policy,
    const qf_sequence_config* config,
    const qf_filters* filters,
    qf_sequence** out) {
  return c_api::guard(__func__, [&] {
    c_api::deref(out, "out");
    const auto c = c_api::read_struct(config, default_config());
    PolicyOptions limits;
    limits.budget = c.budget;
    limits.protection = {c.sinks, c.recent};
    limits.interval = c.interval;
    limits.rule = rule_of(c.rule);
    limits.floor = c.floor;
    limits.block = c.block;
    limits.sign = c.sign;
    limits.seed = c.seed;
    *out = new qf_sequence{SequenceCache(
        layers_of(layers, count),
        Policy::make(
            &c_api::deref(policy, "policy"),
            limits,
            filters == nullptr ? nullptr : filters->bank),
        {c.batch,
         c_api::dtype_of(c.dtype),
         c.byte_limit,
         c.threads,
         order_of(c.row_order),
         format_of(c.row_format)})};
  });
}

void qf_sequence_free(qf_sequence* sequence) {
  delete sequence;
}

qf_status qf_sequence_begin(qf_sequence* sequence, size_t tokens) {
  return c_api::guard(__func__, [&] { cache_of(sequence).begin(tokens); });
}

qf_status qf_sequence_append(
    qf_sequence* sequence,
    size_t layer,
    const qf_tensor* keys,
    const qf_tensor* values) {
  return c_api::guard(__func__, [&] {
    cache_of(sequence).append(
        layer, c_api::view_of(keys, "keys"), c_api::view_of(values, "values"));
  });
}

qf_status qf_sequence_attend(
    const qf_sequence* sequence,
    size_t layer,
    const qf_tensor* queries,
    const qf_attention* options,
    const qf_output* out) {
  return c_api::guard(__func__, [&] {
    c_api::attend_to(cache_of(sequence).rows(layer), queries, options, out);
  });
}

qf_status qf_sequence_commit(qf_sequence* sequence) {
  return c_api::guard(__func__, [&] { cache_of(sequence).commit(); });
}

qf_status qf_sequence_rollback(qf_sequence* sequence) {
  return c_api::guard(__func__, [&] { cache_of(sequence).rollback(); });
}

qf_status qf_sequence_clear(qf_sequence* sequence) {
  return c_api::guard(__func__, [&] { cache_of(sequence).clear(); });
}

qf_status qf_sequence_positions(
    const qf_sequence* sequence,
    size_t layer,
    size_t group,
    int32_t* out,
    size_t capacity,
    size_t* size) {
  return c_api::guard(__func__, [&] {
    const KVStore& store = store_of(sequence, layer, group);
    c_api::copy_out(store.positions(group), out, capacity, size);
  });
}

qf_status qf_sequence_scores(
    const qf_sequence* sequence,
    size_t layer,
    size_t group,
    float* out,
    size_t capacity,
    size_t* size) {
  return c_api::guard(__func__, [&] {
    const KVStore& store = store_of(sequence, layer, group);
    c_api::copy_out(store.scores(group), out, capacity, size);
  });
}

qf_status qf_sequence_keys(
    const qf_sequence* sequence,
    size_t layer,
    size_t group,
    uint16_t* out,
    size_t capacity,
    size_t* size) {
  return c_api::guard(__func__, [&] {
    const KVStore& store = store_of(sequence, layer, group);
    c_api::copy_keys(store, group, out, capacity, size);
  });
}

qf_status qf_sequence_values(
    const qf_sequence* sequence,
    size_t layer,
    size_t group,
    uint16_t* out,
    size_t capacity,
    size_t* size) {
  return c_api::guard(__func__, [&] {
    const KVStore& store = store_of(sequence, layer, group);
    c_api::copy_values(store, group, out, capacity, size);
  });
}

qf_status qf_sequence_get_stats(
    const qf_sequence* sequence, qf_sequence_stats* out, size_t struct_size) {
  return c_api::guard(__func__, [&] {
    const auto s = cache_of(sequence).stats();
    c_api::write_struct(
        out,
        "out",
        struct_size,
        {s.tokens,
         s.rows_min,
         s.rows_max,
         s.rows_mean,
         s.kv_bytes,
         s.kv_bytes_peak,
         s.kv_bytes_full,
         s.evictions,
         s.rows_evicted,
         s.non_finite_scores});
  });
}

qf_status qf_sequence_save(
    const qf_sequence* sequence, void* out, size_t capacity, size_t* size) {
  return c_api::guard(__func__, [&] {
    const auto saved = cache_of(sequence).save().encode();
    c_api::copy_out<std::byte>(
        saved, static_cast<std::byte*>(out), capacity, size);
  });
}

qf_status qf_sequence_restore(
    qf_sequence* sequence, const void* saved, size_t size) {
  return c_api::guard(__func__, [&] {
    cache_of(sequence).restore(
        qfilters::Snapshot::decode(c_api::bytes_of(saved, size)));
  });
}
