#include "qfilters/row_pool.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"

#include "unit/test_util.h"

namespace qfilters {
namespace {

using test::error_of;
using test::IsError;

TEST(RowPoolTest, StartsEmptyAndUnlimited) {
  const RowPool pool;
  EXPECT_EQ(pool.bytes_in_use(), 0U);
  EXPECT_EQ(pool.bytes_free(), 0U);
  EXPECT_EQ(pool.peak_bytes(), 0U);
  EXPECT_EQ(pool.byte_limit(), 0U);
}

TEST(RowPoolTest, HandsOutAlignedZeroedBlocks) {
  RowPool pool;
  for (const std::size_t bytes : {2U, 64U, 130U, 4096U}) {
    std::byte* block = pool.acquire(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % 64, 0U);
    EXPECT_TRUE(std::all_of(
        block, block + bytes, [](std::byte b) { return b == std::byte{0}; }));
    pool.release(block, bytes);
  }
}

TEST(RowPoolTest, ReusesAFreedBlockWithItsOldRows) {
  RowPool pool;
  std::byte* block = pool.acquire(128);
  block[5] = std::byte{7};
  pool.release(block, 128);
  EXPECT_EQ(pool.acquire(128), block);
  EXPECT_EQ(block[5], std::byte{7});
  EXPECT_EQ(pool.bytes_free(), 0U);
  pool.release(block, 128);
}

TEST(RowPoolTest, NeverReusesABlockOfAnotherSize) {
  RowPool pool;
  std::byte* small = pool.acquire(64);
  pool.release(small, 64);
  std::byte* large = pool.acquire(128);
  EXPECT_EQ(pool.bytes_free(), 64U);
  EXPECT_EQ(pool.bytes_in_use(), 128U);
  pool.release(large, 128);
}

TEST(RowPoolTest, CountsBytesInUseFreeAndAtThePeak) {
  RowPool pool;
  std::byte* a = pool.acquire(100);
  std::byte* b = pool.acquire(200);
  EXPECT_EQ(pool.bytes_in_use(), 300U);
  pool.release(a, 100);
  EXPECT_EQ(pool.bytes_in_use(), 200U);
  EXPECT_EQ(pool.bytes_free(), 100U);
  EXPECT_EQ(pool.peak_bytes(), 300U);
  pool.release(b, 200);
  EXPECT_EQ(pool.bytes_in_use(), 0U);
  EXPECT_EQ(pool.bytes_free(), 300U);
  EXPECT_EQ(pool.peak_bytes(), 300U);
}

TEST(RowPoolTest, GivesFreeBlocksToTheSystemOnTrim) {
  RowPool pool;
  std::byte* used = pool.acquire(64);
  pool.release(pool.acquire(64), 64);
  pool.trim();
  EXPECT_EQ(pool.bytes_free(), 0U);
  EXPECT_EQ(pool.bytes_in_use(), 64U);
  EXPECT_EQ(pool.peak_bytes(), 64U);
  pool.release(used, 64);
  EXPECT_EQ(pool.bytes_free(), 64U);
}

TEST(RowPoolTest, AllowsExactlyTheLimit) {
  RowPool pool(256);
  EXPECT_EQ(pool.byte_limit(), 256U);
  std::byte* a = pool.acquire(128);
  std::byte* b = pool.acquire(128);
  EXPECT_EQ(pool.bytes_in_use(), 256U);
  pool.release(a, 128);
  pool.release(b, 128);
}

TEST(RowPoolTest, RefusesMoreThanTheLimitAndStaysAsItWas) {
  RowPool pool(256);
  std::byte* block = pool.acquire(192);
  EXPECT_THAT(
      error_of([&] { static_cast<void>(pool.acquire(128)); }),
      IsError(ErrorKind::kMemoryLimit, "limit of 256"));
  EXPECT_EQ(pool.bytes_in_use(), 192U);
  EXPECT_EQ(pool.peak_bytes(), 192U);
  std::byte* fits = pool.acquire(64);
  pool.release(fits, 64);
  pool.release(block, 192);
}

TEST(RowPoolTest, DoesNotCountFreeBlocksAgainstTheLimit) {
  RowPool pool(128);
  pool.release(pool.acquire(128), 128);
  std::byte* other = pool.acquire(64);
  EXPECT_EQ(pool.bytes_in_use(), 64U);
  pool.release(other, 64);
}

TEST(RowPoolTest, RefusesAHugeBlockInsteadOfWrappingAround) {
  RowPool pool(128);
  std::byte* block = pool.acquire(64);
  constexpr std::size_t kHuge = std::numeric_limits<std::size_t>::max();
  EXPECT_THAT(
      error_of([&] { static_cast<void>(pool.acquire(kHuge)); }),
      IsError(ErrorKind::kMemoryLimit, "limit of 128"));
  pool.release(block, 64);
}

TEST(RowPoolTest, ServesManyThreads) {
  RowPool pool;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      const std::size_t bytes = 64 * (1 + t % 2);
      std::vector<std::byte*> blocks;
      for (int round = 0; round < 50; ++round) {
        for (int i = 0; i < 8; ++i) {
          blocks.push_back(pool.acquire(bytes));
          std::memset(blocks.back(), static_cast<int>(t), bytes);
        }
        for (std::byte* block : blocks) {
          EXPECT_EQ(block[bytes - 1], static_cast<std::byte>(t));
          pool.release(block, bytes);
        }
        blocks.clear();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(pool.bytes_in_use(), 0U);
  EXPECT_LE(pool.peak_bytes(), 16 * std::size_t{64 + 128});
  EXPECT_GE(pool.peak_bytes(), 8 * std::size_t{128});
}

}  // namespace
}  // namespace qfilters
