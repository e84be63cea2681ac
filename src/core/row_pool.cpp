#include "qfilters/row_pool.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "qfilters/error.h"

namespace qfilters {

namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

RowPool::~RowPool() {
  trim();
}

std::byte* RowPool::acquire(std::size_t block_bytes) {
  const std::lock_guard lock(mutex_);
  // in_use_ never exceeds the limit; written so that nothing wraps around.
  if (byte_limit_ != 0 && block_bytes > byte_limit_ - in_use_) {
    throw Error(
        ErrorKind::kMemoryLimit,
        "row pool: " + std::to_string(block_bytes) + " bytes more than the " +
            std::to_string(in_use_) + " in use would exceed the limit of " +
            std::to_string(byte_limit_));
  }
  FreeList& list = free_[block_bytes];
  std::byte* block = nullptr;
  if (list.blocks.empty()) {
    list.blocks.reserve(list.made + 1);  // so that release() cannot fail
    block = static_cast<std::byte*>(::operator new(block_bytes, kAlignment));
    ++list.made;
    // Unused slots of a tile are read (never used) by the kernels.
    std::memset(block, 0, block_bytes);
  } else {
    block = list.blocks.back();
    list.blocks.pop_back();
    free_bytes_ -= block_bytes;
  }
  in_use_ += block_bytes;
  peak_ = std::max(peak_, in_use_);
  return block;
}

void RowPool::release(std::byte* block, std::size_t block_bytes) noexcept {
  const std::lock_guard lock(mutex_);
  in_use_ -= block_bytes;
  free_bytes_ += block_bytes;
  free_.find(block_bytes)->second.blocks.push_back(block);
}

void RowPool::trim() noexcept {
  const std::lock_guard lock(mutex_);
  for (auto& [bytes, list] : free_) {
    for (std::byte* block : list.blocks)
      ::operator delete(block, kAlignment);
    list.made -= list.blocks.size();
    list.blocks.clear();
  }
  free_bytes_ = 0;
  peak_ = in_use_;
}

std::size_t RowPool::bytes_in_use() const noexcept {
  const std::lock_guard lock(mutex_);
  return in_use_;
}

std::size_t RowPool::bytes_free() const noexcept {
  const std::lock_guard lock(mutex_);
  return free_bytes_;
}

std::size_t RowPool::peak_bytes() const noexcept {
  const std::lock_guard lock(mutex_);
  return peak_;
}

}  // namespace qfilters
