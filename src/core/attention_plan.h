#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/attention_call.h"
#include "core/partial_attention.h"
#include "kernels/attend.h"

namespace qfilters {

/// Queries of one head and the row blocks that they see.
struct AttentionJob {
  TaskQueries queries;
  std::size_t count;  ///< of queries, all heads that share the KV head
  std::size_t first_block;
  std::size_t end_block;
  std::size_t slot;  ///< of the first partial sum, if jobs are split
};

/// What one thread does at a time: some or all blocks of a job.
struct AttentionItem {
  std::size_t job;
  std::size_t first_block;
  std::size_t end_block;
  std::size_t cost;
};

/// The work of one call, and its memory, kept between calls so that decoding
/// allocates nothing. Who does what never changes a bit.
class AttentionPlan {
 public:
  void prepare(const AttentionCall& call, bool keep_softmax);

  [[nodiscard]] std::span<const AttentionJob> jobs() const noexcept {
    return jobs_;
  }

  /// The jobs of one head, by token.
  [[nodiscard]] std::span<const AttentionJob> jobs_of(
      std::size_t group) const noexcept {
    return jobs().subspan(group * jobs_per_group_, jobs_per_group_);
  }

  /// Longest first.
  [[nodiscard]] std::span<const AttentionItem> items() const noexcept {
    return items_;
  }

  /// Row blocks of the longest head.
  [[nodiscard]] std::size_t blocks() const noexcept { return blocks_; }

  /// Whether an item is one block, whose sums wait to be merged.
  [[nodiscard]] bool split() const noexcept { return split_; }

  /// Where the sums of a split job over one of its blocks wait.
  [[nodiscard]] PartialAttention partial(
      const AttentionJob& job, std::size_t block) noexcept {
    const std::size_t slot = job.slot + (block - job.first_block) * job.count;
    return {out_.data() + slot * value_dim_, waiting_.data() + slot};
  }

  /// The softmax of each of these queries over all rows, if it is kept.
  [[nodiscard]] std::span<kernels::Softmax> softmax(
      const TaskQueries& which) noexcept;

 private:
  void plan_jobs(const AttentionCall& call);
  void plan_items(const AttentionCall& call);

  std::vector<AttentionJob> jobs_;
  std::vector<AttentionItem> items_;
  std::vector<float> out_;                 // [slot][value_dim]
  std::vector<kernels::Softmax> waiting_;  // [slot]
  std::vector<kernels::Softmax> softmax_;  // [group][token][share]
  std::size_t jobs_per_group_ = 0;
  std::size_t slots_ = 0;
  std::size_t blocks_ = 0;
  std::size_t value_dim_ = 0;
  std::size_t tokens_ = 0;
  std::size_t share_ = 0;
  bool split_ = false;
};

}  // namespace qfilters
