#include "core/kv_cache_state.h"

#include <cstring>
#include <string>
#include <utility>

#include "qfilters/error.h"
#include "qfilters/limits.h"

#include "core/checked_product.h"
#include "core/half.h"
#include "core/key_svd.h"
#include "core/shape_text.h"

namespace qfilters {

namespace {

float read(const TensorView& view, const void* row, std::size_t d) noexcept {
  if (view.dtype == DType::kFloat32) return static_cast<const float*>(row)[d];
  return from_half(view.dtype, static_cast<const std::uint16_t*>(row)[d]);
}

// A dense copy of `view` in the storage type.
void cast(
    const TensorView& view, DType dtype, std::vector<std::uint16_t>& out) {
  out.resize(checked_product({view.batch, view.heads, view.tokens, view.dim}));
  std::uint16_t* to = out.data();
  for (std::size_t b = 0; b < view.batch; ++b) {
    for (std::size_t h = 0; h < view.heads; ++h) {
      for (std::size_t t = 0; t < view.tokens; ++t, to += view.dim) {
        const void* row = view.row(b, h, t);
        if (view.dtype == dtype) {
          std::memcpy(to, row, view.dim * sizeof(*to));
          continue;
        }
        for (std::size_t d = 0; d < view.dim; ++d) {
          to[d] = to_half(dtype, read(view, row, d));
        }
      }
    }
  }
}

// One row of a view or of the store as float32.
void widen(const std::uint16_t* row, DType dtype, std::size_t dim, float* out) {
  for (std::size_t d = 0; d < dim; ++d) {
    out[d] = from_half(dtype, row[d]);
  }
}

}  // namespace

PolicyOptions policy_options(const Config& config) {
  PolicyOptions options;
  options.budget = static_cast<std::size_t>(config.qfilters_budget);
  options.protection.sinks = static_cast<std::size_t>(config.qfilters_n_sink);
  options.protection.recent = static_cast<std::size_t>(config.qfilters_recent);
  options.interval = static_cast<std::size_t>(config.qfilters_interval);
  options.sign = static_cast<int>(config.qfilters_sign);
  return options;
}

std::size_t QFiltersKVCache::State::groups() const {
  return sequence->store(0).shape().groups();
}

std::size_t QFiltersKVCache::State::rows_kept() const {
  if (!sequence) return 0;
  const RowsView view = sequence->rows(0);
  return sequence->open() ? policy.rows_after_commit(view.rows(0))
                          : view.rows(0);
}

void QFiltersKVCache::State::check(
    const TensorView& keys_in, const TensorView& values_in) const {
  if (keys_in.batch == 0 || keys_in.batch != values_in.batch ||
      keys_in.heads != values_in.heads || keys_in.tokens != values_in.tokens ||
      values_in.dim == 0) {
    throw Error(
        ErrorKind::kShape,
        "update_and_fetch: keys " + shape_text(keys_in) + " and values " +
            shape_text(values_in) + " do not belong together");
  }
  if (keys_in.heads == 0 || keys_in.dim == 0) {
    throw Error(
        ErrorKind::kShape,
        "update_and_fetch: keys " + shape_text(keys_in) + " have no heads");
  }
  if (keys_in.tokens > kMostTokens - offset) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "update_and_fetch: keys " + shape_text(keys_in) + " at offset=" +
            std::to_string(offset) + ": positions exceed int32");
  }
  if (calibrated && !sequence &&
      (keys_in.heads != filters->heads || keys_in.dim != filters->dim)) {
    throw Error(
        ErrorKind::kMismatch,
        "update_and_fetch: keys " + shape_text(keys_in) +
            " do not fit filters [heads, dim] = [" +
            std::to_string(filters->heads) + ", " +
            std::to_string(filters->dim) + "]");
  }
  if (!sequence) return;
  const RowShape& shape = sequence->store(0).shape();
  if (keys_in.batch != shape.batch || keys_in.heads != shape.kv_heads ||
      keys_in.dim != shape.key_dim || values_in.dim != shape.value_dim) {
    throw Error(
        ErrorKind::kShape,
        "update_and_fetch: keys " + shape_text(keys_in) + " and values " +
            shape_text(values_in) +
            " after batch=" + std::to_string(shape.batch) +
            " heads=" + std::to_string(shape.kv_heads) +
            " key_dim=" + std::to_string(shape.key_dim) +
            " value_dim=" + std::to_string(shape.value_dim));
  }
}

void QFiltersKVCache::State::settle() {
  if (sequence && sequence->open()) sequence->commit();
}

void QFiltersKVCache::State::start(
    const TensorView& keys_in, const TensorView& values_in) {
  SequenceOptions options;
  options.batch = keys_in.batch;
  options.dtype =
      keys_in.dtype == DType::kBFloat16 && values_in.dtype == DType::kBFloat16
          ? DType::kBFloat16
          : DType::kFloat16;
  sequence = std::make_unique<SequenceCache>(
      std::vector<LayerShape>{{keys_in.heads, keys_in.dim, values_in.dim}},
      policy,
      options);
}

TensorView QFiltersKVCache::State::stage(
    const TensorView& rows,
    Inputs inputs,
    std::vector<std::uint16_t>& memory) const {
  const DType dtype = sequence->options().dtype;
  if (inputs == Inputs::kBorrowed && rows.dtype == dtype) return rows;
  cast(rows, dtype, memory);
  return TensorView::dense(
      memory.data(), dtype, rows.batch, rows.heads, rows.tokens, rows.dim);
}

void QFiltersKVCache::State::freeze_if_due(const TensorView& new_keys) {
  const KVStore& store = sequence->store(0);
  const RowShape& shape = store.shape();
  const std::size_t rows = store.rows(0) + new_keys.tokens;
  if (filters || rows < static_cast<std::size_t>(config.qfilters_calib_tokens))
    return;
  LayerFilters found{shape.groups(), shape.key_dim, {}};
  std::vector<float> observed(rows * shape.key_dim);
  std::vector<std::uint16_t> key(shape.key_dim);
  const RowsView view(store, new_keys, {}, 0);
  for (std::size_t g = 0; g < shape.groups(); ++g) {
    for (std::size_t r = 0; r < rows; ++r) {
      view.read_key(g, r, key.data());
      widen(
          key.data(),
          shape.dtype,
          shape.key_dim,
          observed.data() + r * shape.key_dim);
    }
    const auto direction = key_direction(observed, rows, shape.key_dim);
    found.values.insert(found.values.end(), direction.begin(), direction.end());
  }
  freeze(std::move(found));
}

void QFiltersKVCache::State::freeze(LayerFilters found) {
  Policy frozen = Policy::custom(
      make_group_scorer(found.values, static_cast<int>(config.qfilters_sign)),
      policy_options(config));
  sequence->set_policy(frozen);
  policy = std::move(frozen);
  filters = std::move(found);
}

void QFiltersKVCache::State::undo(bool fresh, bool unfrozen) noexcept {
  if (sequence) sequence->rollback();
  if (unfrozen && filters) {
    filters.reset();
    policy = Policy::full();
    sequence->set_policy(policy);
  }
  if (fresh) sequence.reset();
}

void QFiltersKVCache::State::check_retention() {
  const std::string& action = config.qfilters_on_low_retention;
  if (action == "ignore" || !config.qfilters_min_retention || retention_fired ||
      offset == 0) {
    return;
  }
  const std::size_t rows = rows_kept();
  const double retained =
      static_cast<double>(rows) / static_cast<double>(offset);
  if (retained >= *config.qfilters_min_retention) return;
  retention_fired = true;
  const std::string message = "update_and_fetch: " + std::to_string(rows) +
                              " of " + std::to_string(offset) +
                              " tokens retained, below the floor of " +
                              std::to_string(*config.qfilters_min_retention) +
                              " (qfilters_min_retention); output may degrade";
  if (action == "raise") throw Error(ErrorKind::kLowRetention, message);
  if (warn) warn(message);
}

}  // namespace qfilters
