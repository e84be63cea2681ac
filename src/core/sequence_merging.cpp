// What commit() of a SequenceCache makes of a merger's word.
#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "qfilters/merging.h"
#include "qfilters/sequence_cache.h"

#include "core/half.h"
#include "core/sequence_layer.h"

namespace qfilters {

namespace {

void read_value(
    const RowsView& view,
    std::size_t group,
    std::size_t row,
    std::span<float> out) {
  thread_local std::vector<std::uint16_t> halves;
  halves.resize(out.size());
  view.read_value(group, row, halves.data());
  for (std::size_t d = 0; d < out.size(); ++d)
    out[d] = from_half(view.shape().dtype, halves[d]);
}

// Writes value + more in the dtype; false where that holds no such number.
bool add(
    DType dtype,
    std::span<const float> value,
    std::span<const float> more,
    std::span<std::uint16_t> out) {
  bool finite = true;
  for (std::size_t d = 0; d < out.size(); ++d) {
    out[d] = to_half(dtype, value[d] + more[d]);
    finite = finite && std::isfinite(from_half(dtype, out[d]));
  }
  return finite;
}

}  // namespace

void SequenceCache::plan_merges(GroupPlan& plan) const {
  const RowsView view = rows(plan.layer);
  const std::size_t heads = view.shape().kv_heads;
  const std::size_t dim = view.shape().value_dim;
  // Rows are in temporal order until here, from here on as in the view.
  const auto place = [&](std::uint32_t row) {
    return row < plan.order.size() ? plan.order[row] : row;
  };
  thread_local std::vector<std::int32_t> positions;
  thread_local std::vector<float> unordered;
  layers_[plan.layer]->copy_scores(plan.group, open_tokens_, unordered);
  positions.resize(unordered.size());
  plan.scores.resize(unordered.size());
  for (std::uint32_t r = 0; r < positions.size(); ++r) {
    positions[r] = view.position(plan.group, place(r));
    plan.scores[r] = unordered[place(r)];
  }
  thread_local std::vector<Merge> merges;
  merges.clear();
  policy_.options().merger->merge(
      {plan.layer,
       plan.group / heads,
       plan.group % heads,
       positions,
       plan.scores,
       plan.kept},
      merges);
  thread_local std::vector<float> value;
  value.resize(dim);
  thread_local std::vector<float> sums;  // [kept][value_dim]
  sums.assign(plan.kept.size() * dim, 0.0F);
  for (const Merge& merge : merges) {
    read_value(view, plan.group, place(merge.evicted), value);
    float* sum = sums.data() + merge.first * dim;
    for (std::uint32_t k = 0; k < merge.count; ++k) {
      for (std::size_t d = 0; d < dim; ++d)
        *sum++ += merge.weight * value[d];
    }
  }
  plan.merged_values.resize(plan.kept.size() * dim);
  for (std::size_t k = 0; k < plan.kept.size(); ++k) {
    const auto sum = std::span(sums).subspan(k * dim, dim);
    if (std::ranges::all_of(sum, [](float x) { return x == 0; })) continue;
    read_value(view, plan.group, place(plan.kept[k]), value);
    const auto out =
        std::span(plan.merged_values).subspan(plan.merged.size() * dim, dim);
    if (add(options_.dtype, value, sum, out))
      plan.merged.push_back(place(plan.kept[k]));
  }
}

// Once the rows that stay lie where they belong.
void SequenceCache::apply_merges(const GroupPlan& plan) noexcept {
  KVStore& store = layers_[plan.layer]->store;
  const auto first_new = static_cast<std::uint32_t>(plan.order.size());
  const auto rank = [](const std::vector<std::uint32_t>& rows, auto row) {
    return static_cast<std::size_t>(
        std::lower_bound(rows.begin(), rows.end(), row) - rows.begin());
  };
  const std::uint16_t* value = plan.merged_values.data();
  for (const std::uint32_t row : plan.merged) {
    const std::size_t place =
        row < first_new
            ? rank(plan.kept, row)
            : plan.kept.size() + rank(plan.incoming, row - first_new);
    store.overwrite_value(plan.group, place, value);
    value += store.shape().value_dim;
  }
}

}  // namespace qfilters
