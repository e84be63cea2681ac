#include "qfilters/kv_cache.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "qfilters/error.h"

#include "core/half.h"
#include "core/key_svd.h"

namespace qfilters {

namespace {

std::string describe(const TensorView& view) {
  return "[" + std::to_string(view.batch) + ", " + std::to_string(view.heads) +
         ", " + std::to_string(view.tokens) + ", " + std::to_string(view.dim) +
         "]";
}

float read(const TensorView& view, const void* row, std::size_t d) noexcept {
  if (view.dtype == DType::kFloat32) return static_cast<const float*>(row)[d];
  const std::uint16_t half = static_cast<const std::uint16_t*>(row)[d];
  return view.dtype == DType::kFloat16 ? from_float16(half)
                                       : from_bfloat16(half);
}

// A dense copy of `view` in the storage type.
void cast(
    const TensorView& view, DType dtype, std::vector<std::uint16_t>& out) {
  out.resize(view.batch * view.heads * view.tokens * view.dim);
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
          const float value = read(view, row, d);
          to[d] =
              dtype == DType::kFloat16 ? to_float16(value) : to_bfloat16(value);
        }
      }
    }
  }
}

PolicyOptions policy_options(const Config& config) {
  PolicyOptions options;
  options.budget = static_cast<std::size_t>(config.qfilters_budget);
  options.protection.sinks = static_cast<std::size_t>(config.qfilters_n_sink);
  options.protection.recent = static_cast<std::size_t>(config.qfilters_recent);
  options.interval = static_cast<std::size_t>(config.qfilters_interval);
  options.sign = static_cast<int>(config.qfilters_sign);
  return options;
}

// One row of a view or of the store as float32.
void widen(const std::uint16_t* row, DType dtype, std::size_t dim, float* out) {
  for (std::size_t d = 0; d < dim; ++d) {
    out[d] =
        dtype == DType::kFloat16 ? from_float16(row[d]) : from_bfloat16(row[d]);
  }
}

}  // namespace

struct QFiltersKVCache::State {
  explicit State(const Config& c) : config(c) {}

  Config config;
  Policy policy = Policy::full();  // until there are filters
  // Calibrated: [heads, dim]. Fallback: one head per group once it is frozen.
  std::optional<LayerFilters> filters;
  bool calibrated = false;
  std::function<void(std::string_view)> warn;

  // Made by the first update, which decides shapes and dtype.
  std::unique_ptr<SequenceCache> sequence;
  std::vector<std::uint16_t> keys;  // the new rows of the open update
  std::vector<std::uint16_t> values;
  std::uint64_t full_bytes = 0;
  std::uint64_t seen = 0;
  std::size_t offset = 0;
  bool retention_fired = false;

  [[nodiscard]] std::size_t groups() const {
    return sequence->store(0).shape().groups();
  }

  // Rows a group holds once the open update is settled.
  [[nodiscard]] std::size_t rows_kept() const {
    if (!sequence) return 0;
    const RowsView view = sequence->rows(0);
    return sequence->open() ? policy.rows_after_commit(view.rows(0))
                            : view.rows(0);
  }

  void check(const TensorView& keys_in, const TensorView& values_in) const {
    if (keys_in.batch == 0 || keys_in.batch != values_in.batch ||
        keys_in.heads != values_in.heads ||
        keys_in.tokens != values_in.tokens || values_in.dim == 0) {
      throw Error(
          ErrorKind::kShape,
          "update_and_fetch: keys " + describe(keys_in) + " and values " +
              describe(values_in) + " do not belong together");
    }
    if (keys_in.heads == 0 || keys_in.dim == 0) {
      throw Error(
          ErrorKind::kShape,
          "update_and_fetch: keys " + describe(keys_in) + " have no heads");
    }
    if (calibrated && !sequence &&
        (keys_in.heads != filters->heads || keys_in.dim != filters->dim)) {
      throw Error(
          ErrorKind::kMismatch,
          "update_and_fetch: keys " + describe(keys_in) +
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
          "update_and_fetch: keys " + describe(keys_in) + " and values " +
              describe(values_in) +
              " after batch=" + std::to_string(shape.batch) +
              " heads=" + std::to_string(shape.kv_heads) +
              " key_dim=" + std::to_string(shape.key_dim) +
              " value_dim=" + std::to_string(shape.value_dim));
    }
  }

  void settle() {
    if (sequence && sequence->open()) sequence->commit();
  }

  void start(const TensorView& keys_in, const TensorView& values_in) {
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

  // The fallback's one decision: filters from all rows seen so far, the
  // staged ones included.
  void freeze_if_due(std::size_t tokens) {
    const KVStore& store = sequence->store(0);
    const RowShape& shape = store.shape();
    const std::size_t stored = store.rows(0);
    const std::size_t rows = stored + tokens;
    if (filters ||
        rows < static_cast<std::size_t>(config.qfilters_calib_tokens))
      return;
    LayerFilters found{shape.groups(), shape.key_dim, {}};
    std::vector<float> observed(rows * shape.key_dim);
    std::vector<std::uint16_t> key(shape.key_dim);
    for (std::size_t g = 0; g < shape.groups(); ++g) {
      for (std::size_t r = 0; r < rows; ++r) {
        const std::uint16_t* row = key.data();
        if (r < stored) {
          store.read_key(g, r, key.data());
        } else {
          row = keys.data() + (g * tokens + r - stored) * shape.key_dim;
        }
        widen(
            row,
            shape.dtype,
            shape.key_dim,
            observed.data() + r * shape.key_dim);
      }
      const auto direction = key_direction(observed, rows, shape.key_dim);
      found.values.insert(
          found.values.end(), direction.begin(), direction.end());
    }
    Policy frozen = Policy::custom(
        make_group_scorer(found.values, static_cast<int>(config.qfilters_sign)),
        policy_options(config));
    sequence->set_policy(frozen);
    policy = std::move(frozen);
    filters = std::move(found);
  }

  // Fires at most once; the update is complete by now.
  void check_retention() {
    const std::string& action = config.qfilters_on_low_retention;
    if (action == "ignore" || !config.qfilters_min_retention ||
        retention_fired || offset == 0) {
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
};

QFiltersKVCache::QFiltersKVCache(const Config& config) {
  validate(config);
  state_ = std::make_unique<State>(config);
}

QFiltersKVCache::QFiltersKVCache(const Config& config, LayerFilters filters)
    : QFiltersKVCache(config) {
  state_->policy = Policy::make(
      "qfilters",
      policy_options(config),
      std::make_shared<const FilterBank>(
          std::vector<LayerFilters>{filters}, FilterMetadata{}));
  state_->filters = std::move(filters);
  state_->calibrated = true;
}

QFiltersKVCache::~QFiltersKVCache() = default;
QFiltersKVCache::QFiltersKVCache(QFiltersKVCache&&) noexcept = default;
QFiltersKVCache& QFiltersKVCache::operator=(QFiltersKVCache&&) noexcept =
    default;

RowsView QFiltersKVCache::update_and_fetch(
    const TensorView& keys, const TensorView& values) {
  State& s = *state_;
  s.check(keys, values);
  if (!s.sequence) s.start(keys, values);
  s.settle();
  SequenceCache& sequence = *s.sequence;
  const DType dtype = sequence.options().dtype;
  cast(keys, dtype, s.keys);
  cast(values, dtype, s.values);
  s.freeze_if_due(keys.tokens);
  sequence.begin(keys.tokens);
  try {
    sequence.append(
        0,
        TensorView::dense(
            s.keys.data(),
            dtype,
            keys.batch,
            keys.heads,
            keys.tokens,
            keys.dim),
        TensorView::dense(
            s.values.data(),
            dtype,
            keys.batch,
            keys.heads,
            keys.tokens,
            values.dim));
  } catch (...) {
    sequence.rollback();
    throw;
  }
  const std::uint64_t rows = keys.batch * keys.heads * keys.tokens;
  s.full_bytes += rows * (keys.dim + values.dim) * sizeof(std::uint16_t);
  s.seen += rows;
  s.offset += keys.tokens;
  s.check_retention();
  return sequence.rows(0);
}

void QFiltersKVCache::settle() {
  state_->settle();
  state_->keys = {};
  state_->values = {};
}

std::size_t QFiltersKVCache::offset() const noexcept {
  return state_->offset;
}

bool QFiltersKVCache::empty() const noexcept {
  return state_->sequence == nullptr;
}

namespace {

void check_group(std::size_t group, std::size_t groups) {
  if (group < groups) return;
  throw Error(
      ErrorKind::kInvalidArgument,
      "group " + std::to_string(group) + " of " + std::to_string(groups));
}

}  // namespace

std::vector<std::int32_t> QFiltersKVCache::positions(std::size_t group) {
  check_group(group, empty() ? 0 : state_->groups());
  state_->settle();
  const auto out = state_->sequence->store(0).positions(group);
  return {out.begin(), out.end()};
}

std::vector<float> QFiltersKVCache::scores(std::size_t group) {
  check_group(group, empty() ? 0 : state_->groups());
  state_->settle();
  const auto out = state_->sequence->store(0).scores(group);
  return {out.begin(), out.end()};
}

std::vector<QFiltersState> QFiltersKVCache::states() {
  state_->settle();
  std::vector<QFiltersState> out(empty() ? 0 : state_->groups());
  for (std::size_t g = 0; g < out.size(); ++g) {
    const KVStore& store = state_->sequence->store(0);
    const RowShape& shape = store.shape();
    QFiltersState& state = out[g];
    const auto positions = store.positions(g);
    const auto scores = store.scores(g);
    state.positions.assign(positions.begin(), positions.end());
    state.scores.assign(scores.begin(), scores.end());
    state.keys.resize(positions.size() * shape.key_dim);
    state.values.resize(positions.size() * shape.value_dim);
    for (std::size_t r = 0; r < positions.size(); ++r) {
      store.read_key(g, r, state.keys.data() + r * shape.key_dim);
      store.read_value(g, r, state.values.data() + r * shape.value_dim);
    }
    if (state_->filters) {
      const auto filter = state_->filters->head(g % state_->filters->heads);
      state.filter_dir.assign(filter.begin(), filter.end());
    }
  }
  return out;
}

RowsView QFiltersKVCache::stored() {
  check_group(0, empty() ? 0 : state_->groups());
  state_->settle();
  return state_->sequence->rows(0);
}

AttentionMask QFiltersKVCache::make_mask(
    std::size_t tokens, bool return_array, std::size_t window) {
  state_->settle();
  AttentionMask mask;
  const bool fresh = empty();
  if (tokens == 1 && window == 0) return mask;
  if (fresh && !return_array && window == 0) {
    mask.kind = AttentionMask::Kind::kCausal;
    return mask;
  }
  mask.kind = AttentionMask::Kind::kArray;
  const KVStore* store = fresh ? nullptr : &state_->sequence->store(0);
  mask.batch = fresh ? 1 : store->shape().batch;
  mask.queries = tokens;
  mask.keys = state_->rows_kept() + tokens;
  mask.allowed.reserve(mask.batch * tokens * mask.keys);
  const auto first = static_cast<std::int64_t>(state_->offset);
  std::vector<std::int64_t> keys;
  for (std::size_t b = 0; b < mask.batch; ++b) {
    // Head 0 stands for all heads of a batch element: every stored row is
    // older than the queries, so heads differ through a window only.
    keys.clear();
    if (!fresh) {
      const auto stored = store->positions(b * store->shape().kv_heads);
      keys.assign(stored.begin(), stored.end());
    }
    for (std::size_t t = 0; t < tokens; ++t) {
      keys.push_back(first + static_cast<std::int64_t>(t));
    }
    for (std::size_t q = 0; q < tokens; ++q) {
      const std::int64_t query = first + static_cast<std::int64_t>(q);
      for (const std::int64_t key : keys) {
        const bool seen =
            key <= query &&
            (window == 0 || static_cast<std::size_t>(query - key) < window);
        mask.allowed.push_back(seen ? 1 : 0);
      }
    }
  }
  return mask;
}

std::uint64_t QFiltersKVCache::qfilters_kept_bytes() const noexcept {
  if (empty()) return 0;
  const std::size_t filter_bytes =
      state_->filters ? state_->filters->dim * sizeof(float) : 0;
  return nbytes() + state_->groups() * filter_bytes;
}

std::uint64_t QFiltersKVCache::full_seq_bytes() const noexcept {
  return state_->full_bytes;
}

double QFiltersKVCache::compression_ratio() const noexcept {
  const std::uint64_t kept = qfilters_kept_bytes();
  if (kept == 0) return 1.0;
  return static_cast<double>(full_seq_bytes()) / static_cast<double>(kept);
}

std::uint64_t QFiltersKVCache::tokens_seen() const noexcept {
  return state_->seen;
}

std::size_t QFiltersKVCache::tokens_kept() const noexcept {
  return state_->rows_kept();
}

std::uint64_t QFiltersKVCache::nbytes() const noexcept {
  if (empty()) return 0;
  return state_->groups() * state_->rows_kept() *
         state_->sequence->store(0).shape().row_bytes();
}

std::uint64_t QFiltersKVCache::non_finite_scores() const noexcept {
  if (empty()) return 0;
  return state_->sequence->stats().non_finite_scores;
}

void QFiltersKVCache::trim(std::size_t tokens) {
  throw Error(
      ErrorKind::kUnsupported,
      "trim: " + std::to_string(tokens) +
          " tokens cannot be taken back: evicted rows are gone");
}

const Config& QFiltersKVCache::config() const noexcept {
  return state_->config;
}

void QFiltersKVCache::on_warning(
    std::function<void(std::string_view)> handler) {
  state_->warn = std::move(handler);
}

}  // namespace qfilters
