#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "qfilters/kv_store.h"
#include "qfilters/tensor_view.h"

namespace qfilters {

/// What attention reads: the stored rows of a layer followed by the new rows
/// of the open micro-batch. Two segments, nothing copied. The view borrows
/// both; it is valid until the next call that changes its cache.
class RowsView {
 public:
  /// `new_keys` and `new_values` have the store's dtype and shape (tokens may
  /// be 0); new token i is at position first_position + i.
  RowsView(
      const KVStore& store,
      const TensorView& new_keys,
      const TensorView& new_values,
      std::int32_t first_position) noexcept
      : store_(&store),
        new_keys_(new_keys),
        new_values_(new_values),
        first_position_(first_position) {}

  [[nodiscard]] const RowShape& shape() const noexcept {
    return store_->shape();
  }

  [[nodiscard]] const KVStore& store() const noexcept { return *store_; }

  [[nodiscard]] const TensorView& new_keys() const noexcept {
    return new_keys_;
  }

  [[nodiscard]] const TensorView& new_values() const noexcept {
    return new_values_;
  }

  [[nodiscard]] std::size_t new_rows() const noexcept {
    return new_keys_.tokens;
  }

  /// Position of the first new row (= tokens seen before the micro-batch).
  [[nodiscard]] std::int32_t first_position() const noexcept {
    return first_position_;
  }

  /// Stored plus new rows of a group (group = batch * kv_heads + head).
  [[nodiscard]] std::size_t rows(std::size_t group) const noexcept {
    return store_->rows(group) + new_rows();
  }

  [[nodiscard]] std::int32_t position(
      std::size_t group, std::size_t row) const noexcept;

  /// Puts rows of a group, by their numbers, in the order of their positions:
  /// in slots they lie in any. O(rows) where they are in it already.
  void sort_by_position(
      std::size_t group, std::span<std::uint32_t> rows) const noexcept;

  /// Copies one row as 16-bit values of the store's dtype: key_dim or
  /// value_dim of shape().
  void read_key(
      std::size_t group, std::size_t row, std::uint16_t* out) const noexcept;
  void read_value(
      std::size_t group, std::size_t row, std::uint16_t* out) const noexcept;

 private:
  const KVStore* store_;
  TensorView new_keys_;
  TensorView new_values_;
  std::int32_t first_position_;
};

}  // namespace qfilters
