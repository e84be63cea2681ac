// What commit() of a SequenceCache makes of a merger's word.
#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "qfilters/error.h"
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

// What a merger says, checked: it may be anyone's.
std::vector<Merge> ask(const Merger& merger, const MergeInput& in) {
  std::vector<Merge> merges;
  merger.merge(in, merges);
  const std::size_t kept = in.kept.size();
  for (const Merge& merge : merges) {
    const bool goes = merge.evicted < in.positions.size() &&
                      !std::ranges::binary_search(in.kept, merge.evicted);
    if (goes && merge.first <= kept && merge.count <= kept - merge.first)
      continue;
    throw Error(
        ErrorKind::kInvalidArgument,
        "merger " + std::string(merger.name()) + " gives row " +
            std::to_string(merge.evicted) + " of " +
            std::to_string(in.positions.size()) + " to rows " +
            std::to_string(merge.first) + " to " +
            std::to_string(std::size_t{merge.first} + merge.count) + " of " +
            std::to_string(kept) + " that stay" +
            (goes ? "" : ", but it does not go"));
  }
  return merges;
}

// What kept[first], kept[first + 1], ... are given.
struct Gifts {
  std::size_t first = 0;
  std::vector<float> sums;  // [rows][value_dim]
};

// `merges` name evicted rows as the view does.
void add_up(
    const RowsView& view,
    std::size_t group,
    std::span<const Merge> merges,
    Gifts& out) {
  const std::size_t dim = view.shape().value_dim;
  std::size_t end = 0;
  out.first = merges.empty() ? 0 : merges.front().first;
  for (const Merge& merge : merges) {
    out.first = std::min<std::size_t>(out.first, merge.first);
    end = std::max(end, std::size_t{merge.first} + merge.count);
  }
  out.sums.assign((end - std::min(end, out.first)) * dim, 0.0F);
  thread_local std::vector<float> value;
  value.resize(dim);
  for (const Merge& merge : merges) {
    read_value(view, group, merge.evicted, value);
    float* sum = out.sums.data() + (merge.first - out.first) * dim;
    for (std::uint32_t k = 0; k < merge.count; ++k) {
      for (std::size_t d = 0; d < dim; ++d)
        *sum++ += merge.weight * value[d];
    }
  }
}

}  // namespace

void SequenceCache::plan_merges(GroupPlan& plan) const {
  const RowsView view = rows(plan.layer);
  const std::size_t all = view.rows(plan.group);
  if (plan.kept.size() == all) return;  // only others of its budget lose rows
  // Rows are in temporal order until here, from here on as in the view.
  const auto place = [&](std::uint32_t row) {
    return row < plan.order.size() ? plan.order[row] : row;
  };
  thread_local std::vector<float> unordered;
  layers_[plan.layer]->copy_scores(plan.group, open_tokens_, unordered);
  std::vector<std::int32_t> positions(all);
  plan.scores.resize(all);
  for (std::uint32_t r = 0; r < all; ++r) {
    positions[r] = view.position(plan.group, place(r));
    plan.scores[r] = unordered[place(r)];
  }
  const std::size_t heads = view.shape().kv_heads;
  std::vector<Merge> merges =
      ask(*policy_.options().merger,
          {plan.layer,
           plan.group / heads,
           plan.group % heads,
           positions,
           plan.scores,
           plan.kept});
  for (Merge& merge : merges)
    merge.evicted = place(merge.evicted);
  thread_local Gifts gifts;
  add_up(view, plan.group, merges, gifts);
  const std::size_t dim = view.shape().value_dim;
  std::vector<float> value(dim);
  plan.merged_values.resize(gifts.sums.size());
  for (std::size_t at = 0; at < gifts.sums.size(); at += dim) {
    const auto sum = std::span(gifts.sums).subspan(at, dim);
    if (std::ranges::all_of(sum, [](float x) { return x == 0; })) continue;
    const std::uint32_t row = place(plan.kept[gifts.first + at / dim]);
    read_value(view, plan.group, row, value);
    const auto out =
        std::span(plan.merged_values).subspan(plan.merged.size() * dim, dim);
    if (add(options_.dtype, value, sum, out)) plan.merged.push_back(row);
  }
}

// Once the rows that stay lie where they belong.
void SequenceCache::apply_merges(GroupPlan& plan) noexcept {
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
  plan.merged_values = {};  // as many bytes as the rows' values
}

}  // namespace qfilters
