#include "qfilters/rows_view.h"

#include <algorithm>
#include <cstring>

namespace qfilters {

namespace {

void read_row(
    const TensorView& view,
    std::size_t kv_heads,
    std::size_t group,
    std::size_t token,
    std::uint16_t* out) noexcept {
  std::memcpy(
      out,
      view.row(group / kv_heads, group % kv_heads, token),
      view.dim * sizeof(std::uint16_t));
}

}  // namespace

std::int32_t RowsView::position(
    std::size_t group, std::size_t row) const noexcept {
  const auto positions = store_->positions(group);
  return row < positions.size()
             ? positions[row]
             : first_position_ +
                   static_cast<std::int32_t>(row - positions.size());
}

void RowsView::sort_by_position(
    std::size_t group, std::span<std::uint32_t> rows) const noexcept {
  const auto place = [&](std::uint32_t row) { return position(group, row); };
  if (!std::ranges::is_sorted(rows, {}, place))
    std::ranges::sort(rows, {}, place);
}

void RowsView::read_key(
    std::size_t group, std::size_t row, std::uint16_t* out) const noexcept {
  const std::size_t stored = store_->rows(group);
  if (row < stored) return store_->read_key(group, row, out);
  read_row(new_keys_, shape().kv_heads, group, row - stored, out);
}

void RowsView::read_value(
    std::size_t group, std::size_t row, std::uint16_t* out) const noexcept {
  const std::size_t stored = store_->rows(group);
  if (row < stored) return store_->read_value(group, row, out);
  read_row(new_values_, shape().kv_heads, group, row - stored, out);
}

}  // namespace qfilters
