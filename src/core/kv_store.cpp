#include "qfilters/kv_store.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "qfilters/error.h"
#include "qfilters/limits.h"

#include "core/half.h"
#include "kernels/move_rows.h"
#include "kernels/quantize_row.h"
#include "kernels/types.h"

namespace qfilters {

namespace {

static_assert(kBlockRows == kernels::kTileRows);

constexpr std::size_t blocks_for(std::size_t rows) noexcept {
  return (rows + kBlockRows - 1) / kBlockRows;
}

// Room for `size` elements, twice as many as now or more: a sequence that
// grows row by row allocates now and then only.
template <typename T>
void grow(std::vector<T>& to, std::size_t size) {
  if (size > to.capacity()) to.reserve(std::max(size, 2 * to.capacity()));
}

}  // namespace

// Where an int8 row lies in its block.
struct KVStore::Int8Slot {
  std::int8_t* key;  // kBlockRows apart
  std::int8_t* value;
  float* key_scale;
  float* value_scale;
};

bool RowShape::valid() const noexcept {
  return is_size(batch) && is_size(kv_heads) && is_size(groups()) &&
         is_size(key_dim) && is_size(value_dim) &&
         (dtype == DType::kFloat16 || dtype == DType::kBFloat16) &&
         (format == RowFormat::kSame || format == RowFormat::kInt8);
}

KVStore::KVStore(RowPool& pool, const RowShape& shape)
    : pool_(&pool), shape_(shape) {
  if (!shape.valid()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "KVStore: batch=" + std::to_string(shape.batch) +
            " kv_heads=" + std::to_string(shape.kv_heads) +
            " key_dim=" + std::to_string(shape.key_dim) +
            " value_dim=" + std::to_string(shape.value_dim) +
            " dtype=" + to_string(shape.dtype) +
            " format=" + std::to_string(static_cast<int>(shape.format)) +
            ": sizes and batch * kv_heads must be in 1.." +
            std::to_string(kMostSize) +
            ", the dtype float16 or bfloat16, the format a RowFormat");
  }
  groups_.resize(shape.groups());
}

KVStore::KVStore(KVStore&& other) noexcept
    : pool_(other.pool_),
      shape_(other.shape_),
      groups_(std::exchange(other.groups_, {})) {}

KVStore::~KVStore() {
  for (const Group& group : groups_) {
    for (std::byte* block : group.blocks) {
      pool_->release(block, shape_.block_bytes());
    }
  }
}

std::uint16_t* KVStore::key_slot(
    const Group& group, std::size_t row) const noexcept {
  auto* block =
      reinterpret_cast<std::uint16_t*>(group.blocks[row / kBlockRows]);
  return block + row % kBlockRows;
}

std::uint16_t* KVStore::value_slot(
    const Group& group, std::size_t row) const noexcept {
  auto* block =
      reinterpret_cast<std::uint16_t*>(group.blocks[row / kBlockRows]);
  return block + shape_.key_dim * kBlockRows +
         (row % kBlockRows) * shape_.value_dim;
}

KVStore::Int8Slot KVStore::int8_slot(
    const Group& group, std::size_t row) const noexcept {
  auto* keys = reinterpret_cast<std::int8_t*>(group.blocks[row / kBlockRows]);
  std::int8_t* const values = keys + shape_.key_dim * kBlockRows;
  auto* scales =
      reinterpret_cast<float*>(values + shape_.value_dim * kBlockRows);
  const std::size_t slot = row % kBlockRows;
  return {
      keys + slot,
      values + slot * shape_.value_dim,
      scales + slot,
      scales + kBlockRows + slot};
}

void KVStore::reserve(std::size_t group, std::size_t rows) {
  Group& g = groups_[group];
  const std::size_t wanted = blocks_for(rows);
  const std::size_t before = g.blocks.size();
  grow(g.blocks, wanted);
  grow(g.positions, rows);
  grow(g.scores, rows);
  try {
    while (g.blocks.size() < wanted) {
      g.blocks.push_back(pool_->acquire(shape_.block_bytes()));
    }
  } catch (...) {
    while (g.blocks.size() > before) {
      pool_->release(g.blocks.back(), shape_.block_bytes());
      g.blocks.pop_back();
    }
    throw;
  }
}

void KVStore::append(
    std::size_t group,
    const TensorView& keys,
    const TensorView& values,
    std::span<const std::uint32_t> which,
    std::int32_t first_position,
    std::span<const float> scores) noexcept {
  const std::size_t batch = group / shape_.kv_heads;
  const std::size_t head = group % shape_.kv_heads;
  for (const std::uint32_t token : which) {
    append_row(
        group,
        static_cast<const std::uint16_t*>(keys.row(batch, head, token)),
        static_cast<const std::uint16_t*>(values.row(batch, head, token)),
        first_position + static_cast<std::int32_t>(token),
        scores[token]);
  }
}

void KVStore::append_row(
    std::size_t group,
    const std::uint16_t* key,
    const std::uint16_t* value,
    std::int32_t position,
    float score) noexcept {
  Group& g = groups_[group];
  g.positions.push_back(position);
  g.scores.push_back(score);
  overwrite_row(group, rows(group) - 1, key, value, position, score);
}

void KVStore::overwrite_row(
    std::size_t group,
    std::size_t row,
    const std::uint16_t* key,
    const std::uint16_t* value,
    std::int32_t position,
    float score) noexcept {
  Group& g = groups_[group];
  if (shape_.format == RowFormat::kInt8) {
    const Int8Slot slot = int8_slot(g, row);
    *slot.key_scale = kernels::quantize_row(
        key, shape_.key_dim, half_of(shape_.dtype), slot.key, kBlockRows);
  } else {
    std::uint16_t* slot = key_slot(g, row);
    for (std::size_t d = 0; d < shape_.key_dim; ++d) {
      slot[d * kBlockRows] = key[d];
    }
  }
  overwrite_value(group, row, value);
  g.positions[row] = position;
  g.scores[row] = score;
}

void KVStore::overwrite_value(
    std::size_t group, std::size_t row, const std::uint16_t* value) noexcept {
  const Group& g = groups_[group];
  if (shape_.format == RowFormat::kInt8) {
    const Int8Slot slot = int8_slot(g, row);
    *slot.value_scale = kernels::quantize_row(
        value, shape_.value_dim, half_of(shape_.dtype), slot.value, 1);
  } else {
    std::memcpy(
        value_slot(g, row), value, shape_.value_dim * sizeof(std::uint16_t));
  }
}

void KVStore::append_saved_row(
    std::size_t group,
    const std::byte* row,
    std::int32_t position,
    float score) noexcept {
  Group& g = groups_[group];
  const std::size_t last = g.positions.size();
  if (shape_.format == RowFormat::kInt8) {
    const Int8Slot slot = int8_slot(g, last);
    for (std::size_t d = 0; d < shape_.key_dim; ++d) {
      slot.key[d * kBlockRows] = static_cast<std::int8_t>(row[d]);
    }
    row += shape_.key_dim;
    std::memcpy(slot.value, row, shape_.value_dim);
    row += shape_.value_dim;
    std::memcpy(slot.key_scale, row, sizeof(float));
    std::memcpy(slot.value_scale, row + sizeof(float), sizeof(float));
  } else {
    std::uint16_t* slot = key_slot(g, last);
    for (std::size_t d = 0; d < shape_.key_dim; ++d) {
      std::memcpy(
          slot + d * kBlockRows, row + d * sizeof(*slot), sizeof(*slot));
    }
    row += shape_.key_dim * sizeof(*slot);
    std::memcpy(value_slot(g, last), row, shape_.value_dim * sizeof(*slot));
  }
  g.positions.push_back(position);
  g.scores.push_back(score);
}

void KVStore::keep(
    std::size_t group, std::span<const std::uint32_t> kept) noexcept {
  Group& g = groups_[group];
  for (std::size_t to = 0; to < kept.size();) {
    // Consecutive rows move at once, up to the end of either block.
    const std::size_t from = kept[to];
    const std::size_t most = std::min(
        {kept.size() - to,
         kBlockRows - from % kBlockRows,
         kBlockRows - to % kBlockRows});
    std::size_t count = 1;
    while (count < most && kept[to + count] == from + count)
      ++count;
    if (from != to) {
      const auto tile = [&](std::size_t row) {
        return reinterpret_cast<std::uint16_t*>(g.blocks[row / kBlockRows]);
      };
      const auto move = shape_.format == RowFormat::kInt8
                            ? kernels::move_int8_rows
                            : kernels::move_rows;
      move(
          {tile(from), tile(to), from % kBlockRows, to % kBlockRows, count},
          shape_.key_dim,
          shape_.value_dim);
      std::copy_n(&g.positions[from], count, &g.positions[to]);
      std::copy_n(&g.scores[from], count, &g.scores[to]);
    }
    to += count;
  }
  g.positions.resize(kept.size());
  g.scores.resize(kept.size());
}

void KVStore::set_scores(
    std::size_t group, std::span<const float> scores) noexcept {
  std::copy(scores.begin(), scores.end(), groups_[group].scores.begin());
}

void KVStore::drop_front_blocks(
    std::size_t group, std::size_t blocks) noexcept {
  if (blocks == 0) return;
  Group& g = groups_[group];
  const auto count = static_cast<std::ptrdiff_t>(blocks);
  for (std::size_t i = 0; i < blocks; ++i) {
    pool_->release(g.blocks[i], shape_.block_bytes());
  }
  g.blocks.erase(g.blocks.begin(), g.blocks.begin() + count);
  const auto rows = static_cast<std::ptrdiff_t>(
      std::min(blocks * kBlockRows, g.positions.size()));
  g.positions.erase(g.positions.begin(), g.positions.begin() + rows);
  g.scores.erase(g.scores.begin(), g.scores.begin() + rows);
}

void KVStore::shrink(std::size_t group) noexcept {
  Group& g = groups_[group];
  while (g.blocks.size() > blocks_for(g.positions.size())) {
    pool_->release(g.blocks.back(), shape_.block_bytes());
    g.blocks.pop_back();
  }
}

std::size_t KVStore::bytes() const noexcept {
  std::size_t blocks = 0;
  for (const Group& group : groups_)
    blocks += group.blocks.size();
  return blocks * shape_.block_bytes();
}

void KVStore::read_key(
    std::size_t group, std::size_t row, std::uint16_t* out) const noexcept {
  if (shape_.format == RowFormat::kInt8) {
    const Int8Slot slot = int8_slot(groups_[group], row);
    for (std::size_t d = 0; d < shape_.key_dim; ++d) {
      const auto element = static_cast<float>(slot.key[d * kBlockRows]);
      out[d] = to_half(shape_.dtype, *slot.key_scale * element);
    }
    return;
  }
  const std::uint16_t* slot = key_slot(groups_[group], row);
  for (std::size_t d = 0; d < shape_.key_dim; ++d) {
    out[d] = slot[d * kBlockRows];
  }
}

void KVStore::read_value(
    std::size_t group, std::size_t row, std::uint16_t* out) const noexcept {
  if (shape_.format == RowFormat::kInt8) {
    const Int8Slot slot = int8_slot(groups_[group], row);
    for (std::size_t d = 0; d < shape_.value_dim; ++d) {
      const auto element = static_cast<float>(slot.value[d]);
      out[d] = to_half(shape_.dtype, *slot.value_scale * element);
    }
    return;
  }
  std::memcpy(
      out,
      value_slot(groups_[group], row),
      shape_.value_dim * sizeof(std::uint16_t));
}

void KVStore::save_row(
    std::size_t group, std::size_t row, std::byte* out) const noexcept {
  if (shape_.format == RowFormat::kInt8) {
    const Int8Slot slot = int8_slot(groups_[group], row);
    for (std::size_t d = 0; d < shape_.key_dim; ++d) {
      *out++ = static_cast<std::byte>(slot.key[d * kBlockRows]);
    }
    std::memcpy(out, slot.value, shape_.value_dim);
    out += shape_.value_dim;
    std::memcpy(out, slot.key_scale, sizeof(float));
    std::memcpy(out + sizeof(float), slot.value_scale, sizeof(float));
    return;
  }
  const std::uint16_t* slot = key_slot(groups_[group], row);
  for (std::size_t d = 0; d < shape_.key_dim; ++d, out += sizeof(*slot)) {
    std::memcpy(out, slot + d * kBlockRows, sizeof(*slot));
  }
  std::memcpy(
      out, value_slot(groups_[group], row), shape_.value_dim * sizeof(*slot));
}

}  // namespace qfilters
