// commit() of a SequenceCache: everything that can fail, then the rest.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "qfilters/error.h"
#include "qfilters/selection.h"
#include "qfilters/sequence_cache.h"

#include "core/first_failure.h"
#include "core/sequence_layer.h"

namespace qfilters {

namespace {

void fill_iota(
    std::size_t first, std::size_t last, std::vector<std::uint32_t>& out) {
  out.resize(last - first);
  std::iota(out.begin(), out.end(), static_cast<std::uint32_t>(first));
}

// Calls body(i) for i in 0..count on `threads` threads; body may throw.
template <typename Body>
void for_each(std::size_t count, int threads, const Body& body) {
  const auto end = static_cast<std::ptrdiff_t>(count);
  FirstFailure failure;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (std::ptrdiff_t i = 0; i < end; ++i)
    failure.guard([&] { body(static_cast<std::size_t>(i)); });
  failure.rethrow();
}

// Gives rows of one block, by position, the mean of their scores. Rows are in
// temporal order; `position` tells that of a row.
template <typename Position>
void average_blocks(
    std::span<float> scores, std::size_t block, const Position& position) {
  for (std::size_t begin = 0, end = 0; begin < scores.size(); begin = end) {
    const std::size_t id = position(begin) / block;
    float sum = 0;
    for (; end < scores.size() && position(end) / block == id; ++end)
      sum += scores[end];
    const float mean = sum / static_cast<float>(end - begin);
    std::fill(&scores[begin], &scores[begin] + (end - begin), mean);
  }
}

}  // namespace

void SequenceCache::share_budget() {
  sharings_.clear();
  if (!policy_.bounded()) return;
  const BudgetRule rule = policy_.options().rule;
  // Which plans share: the same key.
  using Key = std::array<std::size_t, 3>;
  std::map<Key, std::size_t> places;
  for (std::size_t i = 0; i < plans_.size(); ++i) {
    const LayerShape& shape = shapes_[plans_[i].layer];
    if (shape.window != 0) continue;
    const Key key{
        plans_[i].group / shape.kv_heads,
        rule == BudgetRule::kShared ? 0 : plans_[i].layer,
        rule == BudgetRule::kUniform ? plans_[i].group : 0};
    const auto [place, added] = places.try_emplace(key, sharings_.size());
    if (added) sharings_.emplace_back();
    sharings_[place->second].plans.push_back(i);
  }
}

void SequenceCache::plan_group(GroupPlan& plan) const {
  plan.drop_blocks = 0;
  plan.evicted = 0;
  plan.in_place = false;
  plan.chosen = false;
  plan.merged.clear();
  if (shapes_[plan.layer].window != 0) return plan_window(plan);
  const std::size_t stored = layers_[plan.layer]->store.rows(plan.group);
  plan.rows_after = stored + open_tokens_;
  fill_iota(0, open_tokens_, plan.incoming);
}

void SequenceCache::plan_window(GroupPlan& plan) const {
  const std::size_t stored = layers_[plan.layer]->store.rows(plan.group);
  // Only whole blocks go, so that rows keep their place in the tiles. The
  // next query sees positions from `oldest` on.
  const std::size_t after = offset_ + open_tokens_;
  const std::size_t oldest =
      after - std::min(after, shapes_[plan.layer].window - 1);
  const std::size_t first = oldest / kBlockRows * kBlockRows;
  const std::size_t held = offset_ - stored;  // position of the first row
  const std::size_t gone = std::min(first - std::min(first, held), stored);
  // Rows before the window that were never stored are skipped.
  const std::size_t skip = first > offset_ ? first - offset_ : 0;
  plan.drop_blocks = skip > 0
                         ? layers_[plan.layer]->store.blocks(plan.group).size()
                         : gone / kBlockRows;
  const std::size_t kept = skip > 0 ? 0 : stored - gone;
  fill_iota(skip, open_tokens_, plan.incoming);
  plan.rows_after = kept + plan.incoming.size();
}

bool SequenceCache::replaces(const GroupPlan& plan) const {
  const PolicyOptions& options = policy_.options();
  return options_.order == RowOrder::kSlot && open_tokens_ == 1 &&
         layers_[plan.layer]->store.rows(plan.group) ==
             policy_.budget(plan.layer) &&
         options.rule == BudgetRule::kUniform && options.block == 1 &&
         policy_.scorer()->frozen() && options.merger == nullptr;
}

void SequenceCache::plan_sharing(Sharing& sharing, Eviction eviction) {
  std::size_t rows = 0;
  for (const std::size_t i : sharing.plans)
    rows += plans_[i].rows_after;
  const std::size_t heads = sharing.plans.size();
  const std::size_t layer = plans_[sharing.plans.front()].layer;
  sharing.keep = rows;
  if (eviction == Eviction::kWhenDue)
    sharing.keep = policy_.rows_after_commit(rows, heads, layer);
  if (eviction == Eviction::kNow)
    sharing.keep = policy_.rows_within_budget(rows, heads, layer);
  sharing.evicts = sharing.keep < rows;
  if (!sharing.evicts) return;
  for (const std::size_t i : sharing.plans) {
    GroupPlan& plan = plans_[i];
    if (!replaces(plan)) {
      plan.chosen = true;
      continue;
    }
    const Layer& l = *layers_[plan.layer];
    EvictionQueue& queue = layers_[plan.layer]->queues[plan.group];
    if (!queue.ready()) {
      queue.build(
          l.store.positions(plan.group),
          l.store.scores(plan.group),
          policy_.options().protection);
    }
    plan.in_place = true;
    plan.evicted = 1;
    plan.rows_after = sharing.keep;
    sharing.evicts = false;  // nothing to choose
  }
}

// Scores of all rows of a group in temporal order, as they are chosen by.
void SequenceCache::gather_scores(GroupPlan& plan) const {
  const Layer& l = *layers_[plan.layer];
  const auto positions = l.store.positions(plan.group);
  const std::size_t stored = positions.size();
  l.copy_scores(plan.group, open_tokens_, plan.scores);
  const Scorer& scorer = *policy_.scorer();
  if (!scorer.frozen()) {
    const std::size_t heads = shapes_[plan.layer].kv_heads;
    scorer.rescore(
        {plan.layer, plan.group / heads, plan.group % heads, rows(plan.layer)},
        plan.scores);
  }
  fill_iota(0, stored, plan.order);
  if (options_.order == RowOrder::kSlot) {
    std::sort(plan.order.begin(), plan.order.end(), [&](auto a, auto b) {
      return positions[a] < positions[b];
    });
    thread_local std::vector<float> unsorted;
    unsorted = plan.scores;
    for (std::size_t i = 0; i < stored; ++i)
      plan.scores[i] = unsorted[plan.order[i]];
  }
  if (policy_.options().block == 1) return;
  average_blocks(
      plan.scores, policy_.options().block, [&](std::size_t i) -> std::size_t {
        return i < stored ? static_cast<std::size_t>(positions[plan.order[i]])
                          : offset_ + i - stored;
      });
}

void SequenceCache::choose_rows(const Sharing& sharing) {
  const PolicyOptions& options = policy_.options();
  if (sharing.plans.size() == 1) {
    GroupPlan& plan = plans_[sharing.plans.front()];
    return select_rows(
        plan.scores, sharing.keep, options.protection, plan.kept);
  }
  thread_local std::vector<SharingHead> heads;
  heads.clear();
  for (const std::size_t i : sharing.plans)
    heads.push_back({plans_[i].scores, &plans_[i].kept});
  select_shared(
      heads,
      sharing.keep,
      policy_.least_rows(plans_[sharing.plans.front()].layer),
      options.protection);
}

// Of the rows that stay, stored ones and new ones apart.
void SequenceCache::split_choice(GroupPlan& plan) const {
  const std::size_t stored = layers_[plan.layer]->store.rows(plan.group);
  const auto first_new = static_cast<std::uint32_t>(stored);
  plan.rows_after = plan.kept.size();
  plan.evicted = stored + open_tokens_ - plan.rows_after;
  const auto split =
      std::lower_bound(plan.kept.begin(), plan.kept.end(), first_new);
  plan.incoming.assign(split, plan.kept.end());
  for (std::uint32_t& row : plan.incoming)
    row -= first_new;
  plan.kept.erase(split, plan.kept.end());
  if (options_.order != RowOrder::kSlot) return;
  for (std::uint32_t& row : plan.kept)
    row = plan.order[row];
  std::sort(plan.kept.begin(), plan.kept.end());
}

void SequenceCache::plan_commit(Eviction eviction) {
  const int threads = options_.threads;
  for_each(
      plans_.size(), threads, [&](std::size_t i) { plan_group(plans_[i]); });
  bool evicts = false;
  for (Sharing& sharing : sharings_) {
    plan_sharing(sharing, eviction);
    evicts = evicts || sharing.evicts;
  }
  if (!evicts) return;
  for_each(plans_.size(), threads, [&](std::size_t i) {
    if (plans_[i].chosen) gather_scores(plans_[i]);
  });
  for_each(sharings_.size(), threads, [&](std::size_t i) {
    if (sharings_[i].evicts) choose_rows(sharings_[i]);
  });
  const bool merges = policy_.options().merger != nullptr;
  for_each(plans_.size(), threads, [&](std::size_t i) {
    if (plans_[i].chosen && merges) plan_merges(plans_[i]);
    if (plans_[i].chosen) split_choice(plans_[i]);
  });
}

void SequenceCache::apply_plan(GroupPlan& plan) noexcept {
  Layer& l = *layers_[plan.layer];
  if (plan.in_place) return replace_row(plan);
  l.queues[plan.group].reset();
  auto scores =
      std::span(l.scores).subspan(plan.group * open_tokens_, open_tokens_);
  if (l.observed) {
    const std::span observed(l.observed_scores[plan.group]);
    l.store.set_scores(plan.group, observed.first(l.store.rows(plan.group)));
    scores = observed.last(open_tokens_);
  }
  if (plan.chosen) l.store.keep(plan.group, plan.kept);
  l.store.drop_front_blocks(plan.group, plan.drop_blocks);
  l.store.append(
      plan.group,
      l.keys,
      l.values,
      plan.incoming,
      static_cast<std::int32_t>(offset_),
      scores);
  apply_merges(plan);
  l.store.shrink(plan.group);
}

void SequenceCache::replace_row(const GroupPlan& plan) noexcept {
  Layer& l = *layers_[plan.layer];
  const auto position = static_cast<std::int32_t>(offset_);
  const float score = l.scores[plan.group];
  const auto slot = l.queues[plan.group].replace(score, position);
  if (!slot) return;
  const std::size_t heads = l.store.shape().kv_heads;
  const auto row = [&](const TensorView& view) {
    return static_cast<const std::uint16_t*>(
        view.row(plan.group / heads, plan.group % heads, 0));
  };
  l.store.overwrite_row(
      plan.group, *slot, row(l.keys), row(l.values), position, score);
}

void SequenceCache::check_complete() const {
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    const bool appended = open_ && layers_[l]->appended;
    if (appended && (layers_[l]->observed || !attention_needs(l))) continue;
    throw Error(
        ErrorKind::kInvalidArgument,
        !open_ ? "commit: no micro-batch is open"
               : "commit: layer " + std::to_string(l) +
                     (appended ? " was not observed, which policy " +
                                     std::string(policy_.name()) + " needs"
                               : " has no new rows"));
  }
}

void SequenceCache::commit() {
  check_complete();
  if (pass_ == Pass::kRehearse) return keep_observed();
  // Everything that can fail comes first; from apply_plans() on nothing does.
  plan_commit(policy_.rehearses() ? Eviction::kNever : Eviction::kWhenDue);
  reserve_groups();
  apply_plans();
  for (const auto& layer : layers_) {
    counters_.non_finite_scores += layer->non_finite;
    layer->non_finite = 0;
    counters_.kv_bytes_full += layer->store.shape().groups() *
                               layer->store.shape().row_bytes() * open_tokens_;
  }
  offset_ += open_tokens_;
  ready_to_evict_ = ready_to_evict_ && open_tokens_ == 0;
  rollback();  // closes the micro-batch
}

void SequenceCache::apply_plans() noexcept {
  for_each(plans_.size(), options_.threads, [&](std::size_t i) {
    apply_plan(plans_[i]);
  });
  std::uint64_t evicted = 0;
  for (const GroupPlan& plan : plans_)
    evicted += plan.evicted;
  counters_.rows_evicted += evicted;
  counters_.evictions += evicted > 0 ? 1 : 0;
}

// commit() of a second reading.
void SequenceCache::keep_observed() noexcept {
  for (const auto& layer : layers_) {
    for (std::size_t g = 0; layer->observed && g < layer->queues.size(); ++g) {
      const std::span scores(layer->observed_scores[g]);
      layer->store.set_scores(g, scores.first(layer->store.rows(g)));
    }
  }
  ready_to_evict_ = true;
  rollback();  // closes the micro-batch
}

bool SequenceCache::eviction_due() const noexcept {
  return std::ranges::any_of(sharings_, [&](const Sharing& sharing) {
    std::size_t rows = 0;
    for (const std::size_t i : sharing.plans)
      rows += layers_[plans_[i].layer]->store.rows(plans_[i].group);
    return policy_.rows_after_commit(
               rows,
               sharing.plans.size(),
               plans_[sharing.plans.front()].layer) < rows;
  });
}

void SequenceCache::evict() {
  if (open_ || (unrehearsed() > 0 && !ready_to_evict_)) {
    throw Error(
        ErrorKind::kInvalidArgument,
        open_ ? "evict: a micro-batch is open"
              : "evict: policy " + std::string(policy_.name()) +
                    " has not seen the last " + std::to_string(unrehearsed()) +
                    " tokens a second time");
  }
  plan_commit(Eviction::kNow);
  apply_plans();
  rehearsed_ = offset_;
  ready_to_evict_ = false;
}

void SequenceCache::reserve_groups() {
  std::size_t done = 0;
  try {
    for (; done < plans_.size(); ++done) {
      const GroupPlan& plan = plans_[done];
      layers_[plan.layer]->store.reserve(
          plan.group, plan.rows_after + plan.drop_blocks * kBlockRows);
    }
  } catch (...) {
    for (std::size_t i = 0; i < done; ++i) {
      layers_[plans_[i].layer]->store.shrink(plans_[i].group);
    }
    throw;
  }
}

}  // namespace qfilters
