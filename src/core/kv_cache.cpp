#include "qfilters/kv_cache.h"

#include <utility>

#include "qfilters/error.h"
#include "qfilters/limits.h"

#include "core/checked_product.h"
#include "core/kv_cache_state.h"

namespace qfilters {

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
    const TensorView& keys, const TensorView& values, Inputs inputs) {
  State& s = *state_;
  s.check(keys, values);
  s.settle();
  const bool fresh = s.sequence == nullptr;
  const bool unfrozen = !s.filters;
  try {
    if (fresh) s.start(keys, values);
    const TensorView new_keys = s.stage(keys, inputs, s.keys);
    const TensorView new_values = s.stage(values, inputs, s.values);
    s.freeze_if_due(new_keys);
    s.sequence->begin(keys.tokens);
    s.sequence->append(0, new_keys, new_values);
  } catch (...) {
    s.undo(fresh, unfrozen);
    throw;
  }
  const std::uint64_t rows = keys.batch * keys.heads * keys.tokens;
  s.full_bytes += rows * (keys.dim + values.dim) * sizeof(std::uint16_t);
  s.seen += rows;
  s.offset += keys.tokens;
  s.check_retention();
  return s.sequence->rows(0);
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
    const auto direction = filter(g);
    state.filter_dir.assign(direction.begin(), direction.end());
  }
  return out;
}

std::span<const float> QFiltersKVCache::filter(std::size_t group) const {
  check_group(group, empty() ? 0 : state_->groups());
  if (!state_->filters) return {};
  return state_->filters->head(group % state_->filters->heads);
}

RowsView QFiltersKVCache::stored() {
  check_group(0, empty() ? 0 : state_->groups());
  state_->settle();
  return state_->sequence->rows(0);
}

AttentionMask QFiltersKVCache::make_mask(
    std::size_t tokens, bool return_array, std::size_t window) {
  if (tokens > kMostTokens - offset()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "make_mask: tokens=" + std::to_string(tokens) +
            " offset=" + std::to_string(offset()) + ": positions exceed int32");
  }
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
  mask.allowed.reserve(checked_product({mask.batch, tokens, mask.keys}));
  std::vector<std::int64_t> keys;
  keys.reserve(mask.keys);
  state_->settle();  // from here on nothing can fail
  const auto first = static_cast<std::int64_t>(state_->offset);
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
