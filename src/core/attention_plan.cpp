#include "core/attention_plan.h"

#include <algorithm>
#include <tuple>

namespace qfilters {

namespace {

// Queries one job holds: enough to pay for converting a tile, few enough to
// stay in cache and to balance threads.
constexpr std::size_t kJobQueries = 64;
// Floats of partial sums that may wait, for each thread. Where more would,
// there are jobs enough for all threads without splitting them.
constexpr std::size_t kMostWaiting = std::size_t{1} << 21;

}  // namespace

void AttentionPlan::prepare(const AttentionCall& call, bool keep_softmax) {
  value_dim_ = call.rows.shape().value_dim;
  tokens_ = call.queries.tokens;
  share_ = call.share;
  plan_jobs(call);
  const auto threads = static_cast<std::size_t>(call.options.threads);
  const std::size_t queries = call.rows.shape().groups() * tokens_ * share_;
  split_ = threads > 1 && slots_ > queries &&
           slots_ * value_dim_ <= threads * kMostWaiting;
  plan_items(call);
  if (split_) {
    out_.resize(slots_ * value_dim_);
    waiting_.resize(slots_);
  }
  softmax_.resize(keep_softmax ? queries : 0);
}

std::span<kernels::Softmax> AttentionPlan::softmax(
    const TaskQueries& which) noexcept {
  if (softmax_.empty()) return {};
  return std::span(softmax_).subspan(
      (which.group * tokens_ + which.begin) * share_,
      (which.end - which.begin) * share_);
}

void AttentionPlan::plan_jobs(const AttentionCall& call) {
  const std::size_t per_job = std::max<std::size_t>(1, kJobQueries / share_);
  jobs_per_group_ = (tokens_ + per_job - 1) / per_job;
  jobs_.clear();
  slots_ = 0;
  blocks_ = 0;
  for (std::size_t g = 0; g < call.rows.shape().groups(); ++g) {
    for (std::size_t begin = 0; begin < tokens_; begin += per_job) {
      const std::size_t end = std::min(begin + per_job, tokens_);
      const std::size_t last = call.rows.store().rows(g) + end - 1;
      const AttentionJob job{
          {g, begin, end},
          (end - begin) * share_,
          call.block_of(g, call.first_visible(g, begin)),
          call.block_of(g, last) + 1,
          slots_};
      slots_ += (job.end_block - job.first_block) * job.count;
      blocks_ = std::max(blocks_, job.end_block);
      jobs_.push_back(job);
    }
  }
}

void AttentionPlan::plan_items(const AttentionCall& call) {
  items_.clear();
  for (std::size_t i = 0; i < jobs_.size(); ++i) {
    const AttentionJob& job = jobs_[i];
    const std::size_t step = split_ ? 1 : job.end_block - job.first_block;
    for (std::size_t b = job.first_block; b < job.end_block; b += step) {
      const std::size_t group = job.queries.group;
      const std::size_t rows =
          call.rows_of(group, b + step - 1).end - call.rows_of(group, b).begin;
      items_.push_back({i, b, b + step, rows * job.count});
    }
  }
  std::ranges::sort(items_, [](const auto& a, const auto& b) {
    return std::tie(b.cost, a.job, a.first_block) <
           std::tie(a.cost, b.job, b.first_block);
  });
}

}  // namespace qfilters
