#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

namespace qfilters {

/// Rows in one block. A block is also one tile of the attention kernels.
inline constexpr std::size_t kBlockRows = 64;

/// Memory for row blocks: hands out fixed-size blocks, keeps freed ones on a
/// free list, counts bytes and enforces a limit. Heads grow and shrink by
/// whole blocks, so ragged heads never reallocate and freed memory can serve
/// another head. Thread safe.
class RowPool {
 public:
  /// `byte_limit` 0 means no limit.
  explicit RowPool(std::size_t byte_limit = 0) noexcept
      : byte_limit_(byte_limit) {}

  RowPool(const RowPool&) = delete;
  RowPool& operator=(const RowPool&) = delete;
  ~RowPool();

  /// A block of `block_bytes` bytes, 64-byte aligned, zeroed when it is new
  /// (a reused block keeps old rows). Throws Error kMemoryLimit when the
  /// blocks in use would exceed the limit, std::bad_alloc without memory.
  [[nodiscard]] std::byte* acquire(std::size_t block_bytes);

  /// Gives a block back; it stays on the free list until trim().
  void release(std::byte* block, std::size_t block_bytes) noexcept;

  /// Returns every free block to the system; the peak starts again from the
  /// bytes in use.
  void trim() noexcept;

  [[nodiscard]] std::size_t bytes_in_use() const noexcept;
  /// Bytes on the free lists: held, but in use by nobody.
  [[nodiscard]] std::size_t bytes_free() const noexcept;
  [[nodiscard]] std::size_t peak_bytes() const noexcept;

  [[nodiscard]] std::size_t byte_limit() const noexcept { return byte_limit_; }

 private:
  struct FreeList {
    std::vector<std::byte*> blocks;
    std::size_t made = 0;  // blocks of this size that exist, free or not
  };

  mutable std::mutex mutex_;
  std::map<std::size_t, FreeList> free_;  // by block size
  std::size_t byte_limit_;
  std::size_t in_use_ = 0;
  std::size_t free_bytes_ = 0;
  std::size_t peak_ = 0;
};

}  // namespace qfilters
