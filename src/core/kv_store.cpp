#include "qfilters/kv_store.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "qfilters/error.h"
#include "qfilters/limits.h"

#include "kernels/move_rows.h"
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

bool RowShape::valid() const noexcept {
  return is_size(batch) && is_size(kv_heads) && is_size(groups()) &&
         is_size(key_dim) && is_size(value_dim) &&
         (dtype == DType::kFloat16 || dtype == DType::kBFloat16);
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
            ": sizes and batch * kv_heads must be in 1.." +
            std::to_string(kMostSize) + ", the dtype float16 or bfloat16");
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
  std::uint16_t* slot = key_slot(g, row);
  for (std::size_t d = 0; d < shape_.key_dim; ++d) {
    slot[d * kBlockRows] = key[d];
  }
  std::memcpy(
      value_slot(g, row), value, shape_.value_dim * sizeof(std::uint16_t));
  g.positions[row] = position;
  g.scores[row] = score;
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
      kernels::move_rows(
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
  const std::uint16_t* slot = key_slot(groups_[group], row);
  for (std::size_t d = 0; d < shape_.key_dim; ++d) {
    out[d] = slot[d * kBlockRows];
  }
}

void KVStore::read_value(
    std::size_t group, std::size_t row, std::uint16_t* out) const noexcept {
  std::memcpy(
      out,
      value_slot(groups_[group], row),
      shape_.value_dim * sizeof(std::uint16_t));
}

}  // namespace qfilters
