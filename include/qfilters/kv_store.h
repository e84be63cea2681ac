#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "qfilters/row_pool.h"
#include "qfilters/tensor_view.h"

namespace qfilters {

/// How a store keeps its rows.
enum class RowFormat : std::uint8_t {
  kSame,  ///< the 16 bits that come in
  /// About half the bytes, with a loss: 8-bit integers and one float32 scale
  /// for each key and each value, symmetric. scale = largest |x| / 127, and an
  /// element reads back as scale * round(x / scale), at most half a scale off;
  /// the round is to nearest even. A key or value with an element that is not
  /// finite reads back as NaN throughout.
  kInt8,
};

[[nodiscard]] constexpr const char* to_string(RowFormat format) noexcept {
  return format == RowFormat::kInt8 ? "int8" : "same";
}

/// Shape of the rows of one attention layer.
struct RowShape {
  std::size_t batch = 1;
  std::size_t kv_heads = 0;
  std::size_t key_dim = 0;
  std::size_t value_dim = 0;
  DType dtype = DType::kFloat16;  ///< that come in: kFloat16 or kBFloat16
  RowFormat format = RowFormat::kSame;

  /// Whether a store can have it: no size is 0, none nor groups() exceeds
  /// kMostSize, the dtype is 16 bits wide, and the format is one of the above.
  [[nodiscard]] bool valid() const noexcept;

  [[nodiscard]] std::size_t groups() const noexcept { return batch * kv_heads; }

  /// Bytes of one stored key and value row, scales included.
  [[nodiscard]] std::size_t row_bytes() const noexcept {
    return format == RowFormat::kInt8 ? key_dim + value_dim + 2 * sizeof(float)
                                      : (key_dim + value_dim) * size_of(dtype);
  }

  [[nodiscard]] std::size_t block_bytes() const noexcept {
    return kBlockRows * row_bytes();
  }

  friend bool operator==(const RowShape&, const RowShape&) = default;
};

/// The stored rows of one layer, ragged per group (group = batch * kv_heads +
/// head): each group has its own block table, positions and scores. Rows stay
/// in the order they are appended in, unless overwrite_row() puts a newer one
/// in the place of another.
///
/// A block holds kBlockRows rows: keys first, dimension-major
/// [key_dim][kBlockRows], so that attention runs along rows without a
/// horizontal sum; then values, row-major [kBlockRows][value_dim]; with int8
/// rows then the scales of the keys [kBlockRows] and of the values.
///
/// Distinct groups may be changed from distinct threads. Indices are not
/// checked here: SequenceCache is the checked edge.
class KVStore {
 public:
  /// `pool` must outlive the store. Throws Error kInvalidArgument for a
  /// shape that is not valid().
  KVStore(RowPool& pool, const RowShape& shape);
  KVStore(const KVStore&) = delete;
  KVStore& operator=(const KVStore&) = delete;
  KVStore(KVStore&& other) noexcept;
  KVStore& operator=(KVStore&&) = delete;
  ~KVStore();

  [[nodiscard]] const RowShape& shape() const noexcept { return shape_; }

  [[nodiscard]] std::size_t rows(std::size_t group) const noexcept {
    return groups_[group].positions.size();
  }

  [[nodiscard]] std::span<const std::int32_t> positions(
      std::size_t group) const noexcept {
    return groups_[group].positions;
  }

  /// Scores as the policy's scorer gave them when the row was appended;
  /// larger = keep.
  [[nodiscard]] std::span<const float> scores(
      std::size_t group) const noexcept {
    return groups_[group].scores;
  }

  [[nodiscard]] std::span<std::byte* const> blocks(
      std::size_t group) const noexcept {
    return groups_[group].blocks;
  }

  /// Makes room for `rows` rows in all, so that append() up to that count
  /// cannot fail. Throws as RowPool::acquire; nothing changes then.
  void reserve(std::size_t group, std::size_t rows);

  /// Copies rows `which` (ascending token indices) of one head of `keys` and
  /// `values` behind the stored ones. Row i gets position first_position + i
  /// and score scores[i]. The views have the store's dtype and dims.
  /// O(count * dim); needs reserve().
  void append(
      std::size_t group,
      const TensorView& keys,
      const TensorView& values,
      std::span<const std::uint32_t> which,
      std::int32_t first_position,
      std::span<const float> scores) noexcept;

  /// One row in the store's dtype; needs reserve(). O(dim).
  void append_row(
      std::size_t group,
      const std::uint16_t* key,
      const std::uint16_t* value,
      std::int32_t position,
      float score) noexcept;

  /// Puts another row in the place of stored row `row`. O(dim).
  void overwrite_row(
      std::size_t group,
      std::size_t row,
      const std::uint16_t* key,
      const std::uint16_t* value,
      std::int32_t position,
      float score) noexcept;

  /// Gives stored row `row` another value; key, position and score stay.
  /// O(value_dim).
  void overwrite_value(
      std::size_t group, std::size_t row, const std::uint16_t* value) noexcept;

  /// One row as save_row() gave it; needs reserve(). O(dim).
  void append_saved_row(
      std::size_t group,
      const std::byte* row,
      std::int32_t position,
      float score) noexcept;

  /// Keeps the rows `kept` (ascending indices of stored rows), in place. The
  /// blocks stay with the group, see shrink(). O(rows * dim).
  void keep(std::size_t group, std::span<const std::uint32_t> kept) noexcept;

  /// Replaces the scores of all rows of a group.
  void set_scores(std::size_t group, std::span<const float> scores) noexcept;

  /// Gives the `blocks` oldest blocks back without moving a row: block
  /// boundaries of the others stay where they are.
  void drop_front_blocks(std::size_t group, std::size_t blocks) noexcept;

  /// Returns blocks that hold no row to the pool.
  void shrink(std::size_t group) noexcept;

  /// Bytes of all blocks the store holds (keys, values and their scales).
  [[nodiscard]] std::size_t bytes() const noexcept;

  /// Copies stored row `row` as row-major values of the store's dtype; int8
  /// rows are rounded to it. O(dim).
  void read_key(
      std::size_t group, std::size_t row, std::uint16_t* out) const noexcept;
  void read_value(
      std::size_t group, std::size_t row, std::uint16_t* out) const noexcept;

  /// Copies stored row `row` bit by bit, row_bytes() bytes: key and value,
  /// then, of int8 rows, the scales of both. O(dim).
  void save_row(
      std::size_t group, std::size_t row, std::byte* out) const noexcept;

 private:
  struct Group {
    std::vector<std::byte*> blocks;
    std::vector<std::int32_t> positions;
    std::vector<float> scores;
  };

  struct Int8Slot;

  [[nodiscard]] std::uint16_t* key_slot(
      const Group& group, std::size_t row) const noexcept;
  [[nodiscard]] std::uint16_t* value_slot(
      const Group& group, std::size_t row) const noexcept;
  [[nodiscard]] Int8Slot int8_slot(
      const Group& group, std::size_t row) const noexcept;

  RowPool* pool_;
  RowShape shape_;
  std::vector<Group> groups_;
};

}  // namespace qfilters
