#include "qfilters/rows_view.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "unit/test_util.h"

namespace qfilters {
namespace {

using test::HalfTensor;
using test::random_halves;

constexpr RowShape kShape{
    .batch = 2,
    .kv_heads = 2,
    .key_dim = 4,
    .value_dim = 6,
    .dtype = DType::kBFloat16};
constexpr std::size_t kTokens = 100;

// A store whose group g holds its own number of the rows before token 70.
class RowsViewTest : public ::testing::Test {
 protected:
  RowsViewTest() {
    const std::vector<float> scores(kTokens);
    for (std::size_t g = 0; g < kShape.groups(); ++g) {
      std::vector<std::uint32_t> which;
      for (std::uint32_t t = 0; t < 70;
           t += 1 + static_cast<std::uint32_t>(g)) {
        which.push_back(t);
      }
      store_.reserve(g, which.size());
      store_.append(g, keys_.view(), values_.view(), which, 0, scores);
    }
  }

  HalfTensor keys_ = random_halves(1, kShape.dtype, 2, 2, kTokens, 4, 3);
  HalfTensor values_ = random_halves(2, kShape.dtype, 2, 2, kTokens, 6, 1);
  RowPool pool_;
  KVStore store_{pool_, kShape};
};

TEST_F(RowsViewTest, ShowsStoredRowsThenNewRows) {
  const RowsView view(store_, keys_.slice(70, 30), values_.slice(70, 30), 70);
  EXPECT_EQ(view.shape(), kShape);
  EXPECT_EQ(&view.store(), &store_);
  EXPECT_EQ(view.new_rows(), 30U);
  EXPECT_EQ(view.first_position(), 70);
  std::vector<std::uint16_t> key(4);
  std::vector<std::uint16_t> value(6);
  for (std::size_t g = 0; g < kShape.groups(); ++g) {
    ASSERT_EQ(view.rows(g), store_.rows(g) + 30);
    std::int32_t last = -1;
    for (std::size_t r = 0; r < view.rows(g); ++r) {
      const std::int32_t position = view.position(g, r);
      EXPECT_GT(position, last);
      last = position;
      const auto token = static_cast<std::size_t>(position);
      view.read_key(g, r, key.data());
      view.read_value(g, r, value.data());
      EXPECT_TRUE(std::ranges::equal(key, keys_.row(g / 2, g % 2, token)));
      EXPECT_TRUE(std::ranges::equal(value, values_.row(g / 2, g % 2, token)));
    }
    EXPECT_EQ(last, 99);
  }
}

TEST_F(RowsViewTest, SortsRowsByPosition) {
  const RowsView view(store_, keys_.slice(70, 30), values_.slice(70, 30), 70);
  for (std::size_t g = 0; g < kShape.groups(); ++g) {
    // New rows first, then every other stored one from the last to the first.
    std::vector<std::uint32_t> rows;
    for (auto r = static_cast<std::uint32_t>(view.rows(g)); r-- > 0;) {
      if (r >= store_.rows(g) || r % 2 == 0) rows.push_back(r);
    }
    std::vector<std::uint32_t> want(rows.rbegin(), rows.rend());
    view.sort_by_position(g, rows);
    EXPECT_EQ(rows, want);
    view.sort_by_position(g, rows);
    EXPECT_EQ(rows, want);
  }
}

TEST_F(RowsViewTest, MayHaveNoNewRows) {
  const RowsView view(store_, keys_.slice(70, 0), values_.slice(70, 0), 70);
  EXPECT_EQ(view.new_rows(), 0U);
  for (std::size_t g = 0; g < kShape.groups(); ++g) {
    EXPECT_EQ(view.rows(g), store_.rows(g));
  }
}

TEST_F(RowsViewTest, MayHaveOnlyNewRows) {
  RowPool pool;
  const KVStore empty(pool, kShape);
  const RowsView view(empty, keys_.view(), values_.view(), 0);
  EXPECT_EQ(view.rows(3), kTokens);
  EXPECT_EQ(view.position(3, 42), 42);
  std::vector<std::uint16_t> key(4);
  view.read_key(3, 42, key.data());
  EXPECT_TRUE(std::ranges::equal(key, keys_.row(1, 1, 42)));
}

}  // namespace
}  // namespace qfilters
