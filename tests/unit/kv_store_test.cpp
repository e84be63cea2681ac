#include "qfilters/kv_store.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"

#include "unit/test_util.h"

namespace qfilters {
namespace {

using ::testing::ElementsAre;

using test::error_of;
using test::HalfTensor;
using test::IsError;
using test::Random;
using test::random_halves;

constexpr RowShape kShape{
    .batch = 2,
    .kv_heads = 3,
    .key_dim = 5,
    .value_dim = 7,
    .dtype = DType::kFloat16};

std::vector<std::uint32_t> iota(std::size_t first, std::size_t count) {
  std::vector<std::uint32_t> out(count);
  std::iota(out.begin(), out.end(), static_cast<std::uint32_t>(first));
  return out;
}

// What a store should hold, kept in plain vectors.
struct Row {
  std::vector<std::uint16_t> key;
  std::vector<std::uint16_t> value;
  std::int32_t position = 0;
  float score = 0;
};

std::size_t blocks_for(std::size_t rows) {
  return (rows + kBlockRows - 1) / kBlockRows;
}

// A store beside its plain copy; every row is random and its own.
class Fixture {
 public:
  explicit Fixture(const RowShape& shape = kShape, std::size_t byte_limit = 0)
      : shape_(shape),
        pool(byte_limit),
        store(pool, shape),
        groups(shape.groups()) {}

  // Appends every `stride`-th of `tokens` new rows to one group.
  void append(std::size_t group, std::size_t tokens, std::size_t stride = 1) {
    const HalfTensor keys = rows(tokens, shape_.key_dim);
    const HalfTensor values = rows(tokens, shape_.value_dim);
    std::vector<float> scores;
    std::vector<std::uint32_t> which;
    for (std::size_t t = 0; t < tokens; ++t) {
      scores.push_back(random_.normal());
      if (t % stride == 0) which.push_back(static_cast<std::uint32_t>(t));
    }
    store.reserve(group, store.rows(group) + which.size());
    store.append(group, keys.view(), values.view(), which, next_, scores);
    const std::size_t b = group / shape_.kv_heads;
    const std::size_t h = group % shape_.kv_heads;
    for (const std::uint32_t t : which) {
      groups[group].push_back(
          {stored(keys.row(b, h, t)),
           stored(values.row(b, h, t)),
           next_ + static_cast<std::int32_t>(t),
           scores[t]});
    }
    next_ += static_cast<std::int32_t>(tokens);
  }

  void keep(std::size_t group, const std::vector<std::uint32_t>& kept) {
    store.keep(group, kept);
    std::vector<Row> left;
    for (const std::uint32_t row : kept) {
      left.push_back(groups[group][row]);
    }
    groups[group] = left;
  }

  void drop_front_blocks(std::size_t group, std::size_t blocks) {
    store.drop_front_blocks(group, blocks);
    auto& rows = groups[group];
    const std::size_t gone = std::min(blocks * kBlockRows, rows.size());
    rows.erase(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(gone));
  }

  // What is read of a row once it is stored.
  [[nodiscard]] std::vector<std::uint16_t> stored(
      std::span<const std::uint16_t> row) const {
    if (shape_.format == RowFormat::kSame) return {row.begin(), row.end()};
    return test::read_back(
        shape_.dtype, test::reference_quantized(shape_.dtype, row));
  }

  // Every row, bit for bit, and every byte counter.
  void expect_same() const {
    std::size_t blocks = 0;
    std::vector<std::uint16_t> key(shape_.key_dim);
    std::vector<std::uint16_t> value(shape_.value_dim);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      SCOPED_TRACE("group " + std::to_string(g));
      blocks += store.blocks(g).size();
      ASSERT_EQ(store.rows(g), groups[g].size());
      ASSERT_EQ(store.positions(g).size(), groups[g].size());
      ASSERT_EQ(store.scores(g).size(), groups[g].size());
      for (std::size_t r = 0; r < groups[g].size(); ++r) {
        const Row& want = groups[g][r];
        store.read_key(g, r, key.data());
        store.read_value(g, r, value.data());
        ASSERT_EQ(key, want.key) << "row " << r;
        ASSERT_EQ(value, want.value) << "row " << r;
        ASSERT_EQ(store.positions(g)[r], want.position) << "row " << r;
        ASSERT_EQ(store.scores(g)[r], want.score) << "row " << r;
      }
    }
    EXPECT_EQ(store.bytes(), blocks * shape_.block_bytes());
    EXPECT_EQ(pool.bytes_in_use(), store.bytes());
  }

 private:
  HalfTensor rows(std::size_t tokens, std::size_t dim) {
    return random_halves(
        ++seed_, shape_.dtype, shape_.batch, shape_.kv_heads, tokens, dim, 3);
  }

  RowShape shape_;
  Random random_{1};
  std::uint64_t seed_ = 0;
  std::int32_t next_ = 0;

 public:
  RowPool pool;
  KVStore store;
  std::vector<std::vector<Row>> groups;
};

TEST(RowShapeTest, CountsGroupsAndBytes) {
  EXPECT_EQ(kShape.groups(), 6U);
  EXPECT_EQ(kShape.row_bytes(), 24U);
  EXPECT_EQ(kShape.block_bytes(), 24U * kBlockRows);
  RowShape int8 = kShape;
  int8.format = RowFormat::kInt8;
  EXPECT_EQ(int8.row_bytes(), 5U + 7U + 4U + 4U);
  EXPECT_EQ(int8.block_bytes(), 20U * kBlockRows);
}

TEST(KVStoreTest, StartsWithoutRowsOrBlocks) {
  const Fixture f;
  EXPECT_EQ(f.store.shape(), kShape);
  EXPECT_EQ(f.store.bytes(), 0U);
  f.expect_same();
}

TEST(KVStoreTest, RejectsZeroSizesAndWideElements) {
  RowPool pool;
  for (const RowShape shape :
       {RowShape{0, 1, 1, 1},
        RowShape{1, 0, 1, 1},
        RowShape{1, 1, 0, 1},
        RowShape{1, 1, 1, 0},
        RowShape{1, 1, 1, 1, DType::kFloat32},
        RowShape{1, 1, 1, 1, DType::kFloat16, static_cast<RowFormat>(2)}}) {
    EXPECT_THAT(
        error_of([&] { const KVStore store(pool, shape); }),
        IsError(ErrorKind::kInvalidArgument, "KVStore: "));
  }
}

TEST(KVStoreTest, ReturnsAppendedRowsBitForBit) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    RowPool pool;
    // Every 16-bit pattern, NaN and infinities included, passes unchanged.
    constexpr std::size_t kDim = 256;
    KVStore store(pool, {1, 1, kDim, kDim, dtype});
    HalfTensor keys(dtype, 1, 1, 256, kDim);
    std::iota(keys.data().begin(), keys.data().end(), std::uint16_t{0});
    HalfTensor values(dtype, 1, 1, 256, kDim);
    std::iota(values.data().rbegin(), values.data().rend(), std::uint16_t{0});
    store.reserve(0, 256);
    const std::vector<float> scores(256);
    store.append(0, keys.view(), values.view(), iota(0, 256), 0, scores);
    std::vector<std::uint16_t> row(kDim);
    for (std::size_t t = 0; t < 256; ++t) {
      store.read_key(0, t, row.data());
      EXPECT_TRUE(std::ranges::equal(row, keys.row(0, 0, t)));
      store.read_value(0, t, row.data());
      EXPECT_TRUE(std::ranges::equal(row, values.row(0, 0, t)));
    }
  }
}

TEST(KVStoreTest, HoldsKeysDimensionMajorThenValuesRowMajor) {
  Fixture f;
  f.append(4, kBlockRows + 2);
  for (std::size_t r = 0; r < kBlockRows + 2; ++r) {
    const auto* block = reinterpret_cast<const std::uint16_t*>(
        f.store.blocks(4)[r / kBlockRows]);
    const std::size_t slot = r % kBlockRows;
    for (std::size_t d = 0; d < kShape.key_dim; ++d) {
      EXPECT_EQ(block[d * kBlockRows + slot], f.groups[4][r].key[d]);
    }
    const auto* value =
        block + kShape.key_dim * kBlockRows + slot * kShape.value_dim;
    for (std::size_t d = 0; d < kShape.value_dim; ++d) {
      EXPECT_EQ(value[d], f.groups[4][r].value[d]);
    }
  }
}

TEST(KVStoreTest, GivesAppendedRowsTheirOwnPositionsAndScores) {
  Fixture f;
  f.append(1, 7, 3);  // tokens 0, 3, 6
  EXPECT_THAT(f.store.positions(1), ElementsAre(0, 3, 6));
  f.append(1, 2);
  EXPECT_THAT(f.store.positions(1), ElementsAre(0, 3, 6, 7, 8));
  f.expect_same();
}

TEST(KVStoreTest, LetsEachGroupHaveItsOwnNumberOfRows) {
  Fixture f;
  const std::vector<std::size_t> rows = {0, 1, 63, 64, 65, 200};
  for (std::size_t g = 0; g < rows.size(); ++g) {
    f.append(g, rows[g]);
  }
  f.expect_same();
  for (std::size_t g = 0; g < rows.size(); ++g) {
    EXPECT_EQ(f.store.blocks(g).size(), blocks_for(rows[g]));
  }
}

TEST(KVStoreTest, CrossesBlockBoundariesRowByRow) {
  Fixture f;
  for (std::size_t i = 0; i < 130; ++i) {
    f.append(2, 1);
  }
  EXPECT_EQ(f.store.blocks(2).size(), 3U);
  f.expect_same();
}

TEST(KVStoreTest, CompactsKeptRowsInPlace) {
  for (const std::size_t rows : {63U, 64U, 65U, 150U}) {
    SCOPED_TRACE(rows);
    Fixture f;
    f.append(0, rows);
    f.append(5, rows);
    std::vector<std::uint32_t> odd;
    for (std::uint32_t r = 1; r < rows; r += 2) {
      odd.push_back(r);
    }
    f.keep(5, odd);
    f.expect_same();
    EXPECT_EQ(f.store.blocks(5).size(), blocks_for(rows));
  }
}

TEST(KVStoreTest, KeepsAllOrNone) {
  Fixture f;
  f.append(3, 70);
  f.keep(3, iota(0, 70));
  f.expect_same();
  f.keep(3, {});
  f.expect_same();
  EXPECT_EQ(f.store.rows(3), 0U);
}

TEST(KVStoreTest, ReturnsEmptyBlocksOnShrink) {
  Fixture f;
  f.append(0, 200);
  f.keep(0, iota(70, 65));
  f.store.shrink(0);
  EXPECT_EQ(f.store.blocks(0).size(), 2U);
  EXPECT_EQ(f.pool.bytes_free(), 2 * kShape.block_bytes());
  f.keep(0, iota(0, 64));
  f.store.shrink(0);
  EXPECT_EQ(f.store.blocks(0).size(), 1U);
  f.expect_same();
}

TEST(KVStoreTest, DropsWholeBlocksAtTheFront) {
  Fixture f;
  f.append(1, 150);
  const std::byte* second = f.store.blocks(1)[1];
  f.drop_front_blocks(1, 0);
  f.expect_same();
  f.drop_front_blocks(1, 1);
  EXPECT_EQ(f.store.blocks(1)[0], second);  // nothing moved
  EXPECT_EQ(f.store.positions(1).front(), 64);
  f.expect_same();
  f.append(1, 50);
  f.drop_front_blocks(1, f.store.blocks(1).size());
  EXPECT_EQ(f.store.rows(1), 0U);
  f.expect_same();
}

TEST(KVStoreTest, ReservesBlocksOnlyForRowsThatDoNotFit) {
  Fixture f;
  f.store.reserve(0, 64);
  EXPECT_EQ(f.store.blocks(0).size(), 1U);
  f.store.reserve(0, 65);
  EXPECT_EQ(f.store.blocks(0).size(), 2U);
  f.store.reserve(0, 3);
  EXPECT_EQ(f.store.blocks(0).size(), 2U);
  EXPECT_EQ(f.store.rows(0), 0U);
}

TEST(KVStoreTest, StaysAsItWasWhenReserveExceedsTheLimit) {
  Fixture f(kShape, 3 * kShape.block_bytes());
  f.append(0, 65);
  EXPECT_THAT(
      error_of([&] { f.store.reserve(0, 4 * kBlockRows); }),
      IsError(ErrorKind::kMemoryLimit, "limit"));
  EXPECT_EQ(f.store.blocks(0).size(), 2U);
  f.expect_same();
  f.append(0, 127);  // exactly the limit
  f.expect_same();
}

TEST(KVStoreTest, LetsAnotherGroupReuseFreedBlocks) {
  Fixture f(kShape, 2 * kShape.block_bytes());
  f.append(0, 128);
  f.keep(0, {});
  f.store.shrink(0);
  f.append(3, 100);
  f.expect_same();
}

TEST(KVStoreTest, ReturnsItsBlocksWhenItGoes) {
  RowPool pool;
  {
    KVStore store(pool, kShape);
    store.reserve(2, 100);
    KVStore moved(std::move(store));
    EXPECT_EQ(moved.bytes(), 2 * kShape.block_bytes());
    EXPECT_EQ(pool.bytes_in_use(), moved.bytes());
  }
  EXPECT_EQ(pool.bytes_in_use(), 0U);
  EXPECT_EQ(pool.bytes_free(), 2 * kShape.block_bytes());
}

void agree_over_random_changes(RowFormat format) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    RowShape shape = kShape;
    shape.dtype = dtype;
    shape.format = format;
    Fixture f(shape);
    Random random(7);
    for (int step = 0; step < 300; ++step) {
      const std::size_t g = random.below(shape.groups());
      switch (random.below(6)) {
        case 0:
        case 1:
          f.append(g, random.below(100), 1 + random.below(3));
          break;
        case 2: {
          std::vector<std::uint32_t> kept;
          for (std::uint32_t r = 0; r < f.groups[g].size(); ++r) {
            if (random.below(3) != 0) kept.push_back(r);
          }
          f.keep(g, kept);
          break;
        }
        case 3:
          f.store.shrink(g);
          break;
        case 4:
          f.drop_front_blocks(g, random.below(f.store.blocks(g).size() + 1));
          break;
        default:
          f.store.reserve(g, random.below(300));
      }
      if (step % 10 == 0) f.expect_same();
      if (::testing::Test::HasFatalFailure()) return;
    }
    f.expect_same();
  }
}

TEST(KVStoreTest, AgreesWithPlainVectorsOverRandomChanges) {
  agree_over_random_changes(RowFormat::kSame);
}

TEST(KVStoreTest, AgreesWithPlainVectorsOverRandomChangesOfInt8Rows) {
  agree_over_random_changes(RowFormat::kInt8);
}

TEST(KVStoreTest, AllowsDistinctGroupsToChangeInDistinctThreads) {
  RowPool pool;
  KVStore store(pool, kShape);
  const HalfTensor keys = random_halves(1, kShape.dtype, 2, 3, 300, 5);
  const HalfTensor values = random_halves(2, kShape.dtype, 2, 3, 300, 7);
  const std::vector<float> scores(300);
  std::vector<std::thread> threads;
  for (std::size_t g = 0; g < kShape.groups(); ++g) {
    threads.emplace_back([&, g] {
      for (std::uint32_t t = 0; t < 300; ++t) {
        store.reserve(g, store.rows(g) + 1);
        store.append(g, keys.view(), values.view(), std::vector{t}, 0, scores);
        if (t % 100 == 99) store.keep(g, iota(10, store.rows(g) - 10));
        store.shrink(g);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::vector<std::uint16_t> row(kShape.key_dim);
  for (std::size_t g = 0; g < kShape.groups(); ++g) {
    ASSERT_EQ(store.rows(g), 270U);
    store.read_key(g, 269, row.data());
    EXPECT_TRUE(std::ranges::equal(row, keys.row(g / 3, g % 3, 299)));
    EXPECT_EQ(store.positions(g)[0], 30);
  }
  EXPECT_EQ(pool.bytes_in_use(), store.bytes());
}

}  // namespace
}  // namespace qfilters
