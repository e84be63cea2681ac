// Policies that score a head's keys anew whenever rows are chosen, against slow
// direct computations.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/key_difference.h"
#include "qfilters/scoring.h"
#include "qfilters/sequence_cache.h"

#include "policies/scorers.h"
#include "unit/rescore_fixture.h"
#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters::policies {
namespace {

using test::bits_of;
using test::error_of;
using test::IsError;
using test::keys_of;
using test::Model;

using KeyPolicyTest = test::RescoreTest;

TEST_F(KeyPolicyTest, KeyDiffIsHowMuchKeysDiffer) {
  const auto scorer = make_keydiff_scorer();
  for_each_cache([&](const RowsView& rows, std::size_t group) {
    std::vector<float> want(rows.rows(group));
    key_differences(rows, group, want);
    ASSERT_EQ(bits_of(rescored(*scorer, rows, group)), bits_of(want));
  });
}

TEST_F(KeyPolicyTest, KeySvdIsTheProjectionOnTheKeysDirection) {
  for (const int sign : {1, -1}) {
    const auto scorer = make_keysvd_scorer(sign);
    for_each_cache([&](const RowsView& rows, std::size_t group) {
      const auto keys = keys_of(rows, group);
      std::vector<float> flat;
      for (const auto& key : keys)
        flat.insert(flat.end(), key.begin(), key.end());
      // key_direction() has a test of its own.
      const auto direction =
          key_direction(flat, keys.size(), keys.front().size());
      const auto got = rescored(*scorer, rows, group);
      for (std::size_t r = 0; r < keys.size(); ++r) {
        double dot = 0;
        for (std::size_t d = 0; d < direction.size(); ++d)
          dot += double{keys[r][d]} * direction[d];
        ASSERT_NEAR(got[r], sign * dot, 2e-5) << "row " << r;
      }
    });
  }
}

TEST_F(KeyPolicyTest, KeySvdRefusesASignThatIsNone) {
  EXPECT_THAT(
      error_of([] { (void)make_keysvd_scorer(0); }),
      IsError(ErrorKind::kInvalidArgument, "sign must be +1 or -1, got 0"));
  EXPECT_NE(
      make_keysvd_scorer(1)->identity(), make_keysvd_scorer(-1)->identity());
}

TEST_F(KeyPolicyTest, TheyScoreNothingWhenRowsEnter) {
  const Model& model = test::two_layers();
  for (const auto& scorer : {make_keydiff_scorer(), make_keysvd_scorer()}) {
    std::vector<float> scores(5, 1.0F);
    scorer->score({0, 0, 0, model.keys[0].slice(0, 5), 0}, scores);
    EXPECT_THAT(scores, ::testing::Each(0.0F));
    EXPECT_FALSE(scorer->frozen());
    EXPECT_EQ(scorer->attention(), std::nullopt);
  }
}

TEST_F(KeyPolicyTest, KeysAreReadAsTheyAre) {
  for_each_cache([&](const RowsView& rows, std::size_t group) {
    const auto want = keys_of(rows, group);
    const std::size_t dim = rows.shape().key_dim;
    std::vector<float> keys(want.size() * dim);
    read_keys(rows, group, keys);
    std::vector<float> tiles(key_tile_floats(rows, group), test::kNaN);
    read_key_tiles(rows, group, tiles);
    const std::size_t slots =
        (want.size() + kBlockRows - 1) / kBlockRows * kBlockRows;
    ASSERT_EQ(tiles.size(), slots * dim);
    for (std::size_t r = 0; r < slots; ++r) {
      for (std::size_t d = 0; d < dim; ++d) {
        const float tiled = tiles
            [r / kBlockRows * kBlockRows * dim + d * kBlockRows +
             r % kBlockRows];
        ASSERT_EQ(tiled, r < want.size() ? want[r][d] : 0.0F);
        if (r < want.size()) {
          ASSERT_EQ(keys[r * dim + d], want[r][d]);
        }
      }
    }
  });
}

TEST_F(KeyPolicyTest, ValuesAreReadAsTheyAre) {
  for_each_cache([&](const RowsView& rows, std::size_t group) {
    const std::size_t dim = rows.shape().value_dim;
    std::vector<float> values(rows.rows(group) * dim);
    read_values(rows, group, values);
    std::vector<std::uint16_t> row(dim);
    for (std::size_t r = 0; r < rows.rows(group); ++r) {
      rows.read_value(group, r, row.data());
      for (std::size_t d = 0; d < dim; ++d) {
        ASSERT_EQ(
            values[r * dim + d], test::decode(rows.shape().dtype, row[d]));
      }
    }
  });
}

TEST_F(KeyPolicyTest, ReadingKeysNeedsRoomForThemAll) {
  const Model& model = test::two_layers();
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.feed(cache, {10});
  std::vector<float> out(10 * 24 - 1);
  EXPECT_THAT(
      error_of([&] { read_keys(cache.rows(0), 0, out); }),
      IsError(ErrorKind::kShape, "239 values, not 10 rows of 24"));
  EXPECT_THAT(
      error_of([&] { read_key_tiles(cache.rows(0), 0, out); }),
      IsError(ErrorKind::kShape, "239 values, not 1536 for 10 rows of 24"));
  EXPECT_THAT(
      error_of([&] { read_values(cache.rows(0), 0, out); }),
      IsError(ErrorKind::kShape, "read values: room for 239 values"));
}

}  // namespace
}  // namespace qfilters::policies
