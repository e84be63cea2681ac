#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "qfilters/attention.h"

#include "kernels/attend.h"

namespace qfilters {

/// A query's rows are summed in blocks of this many, each by itself, and the
/// sums merged in order: threads can share a head, and no bit tells.
inline constexpr std::size_t kRowBlock = 1024;
static_assert(kRowBlock % kBlockRows == 0);

/// Tokens [begin, end) of one KV head: the queries that one task holds.
struct TaskQueries {
  std::size_t group;
  std::size_t begin;
  std::size_t end;
};

/// Rows [begin, end) of a head.
struct RowRange {
  std::size_t begin;
  std::size_t end;
};

/// One call of attend(): what all its tasks share.
struct AttentionCall {
  const TensorView& queries;
  const RowsView& rows;
  const AttentionOptions& options;
  const OutputView& out;
  float scale;
  std::size_t share;  ///< query heads of one KV head

  /// First row that the query of new token `token` may see, given the window.
  [[nodiscard]] std::size_t first_visible(
      std::size_t group, std::size_t token) const noexcept;

  /// Blocks are counted from a position, so that a windowed layer's dropped
  /// blocks move no border; this many rows of block 0 are not there.
  [[nodiscard]] std::size_t missing_rows(std::size_t group) const noexcept {
    const auto first = static_cast<std::size_t>(rows.position(group, 0));
    return first / kBlockRows * kBlockRows % kRowBlock;
  }

  [[nodiscard]] std::size_t block_of(
      std::size_t group, std::size_t row) const noexcept {
    return (missing_rows(group) + row) / kRowBlock;
  }

  [[nodiscard]] RowRange rows_of(
      std::size_t group, std::size_t block) const noexcept {
    const std::size_t missing = missing_rows(group);
    return {
        std::max(block * kRowBlock, missing) - missing,
        std::min((block + 1) * kRowBlock - missing, rows.rows(group))};
  }
};

/// A task's queries as the kernels want them; keeps its memory.
class GatheredQueries {
 public:
  void gather(const AttentionCall& call, const TaskQueries& which);

  [[nodiscard]] std::size_t count() const noexcept { return first_.size(); }

  /// The task of these queries over what they see of `rows`; out and softmax
  /// are null. Valid until the next call of either function.
  [[nodiscard]] kernels::AttendTask over(
      const AttentionCall& call,
      const std::vector<const std::uint16_t*>& tiles,
      RowRange rows);

 private:
  std::size_t group_ = 0;
  std::vector<float> query_;
  std::vector<std::uint32_t> first_;
  std::vector<std::uint32_t> last_;
  std::vector<std::uint32_t> first_in_range_;
  std::vector<std::uint32_t> last_in_range_;
};

}  // namespace qfilters
