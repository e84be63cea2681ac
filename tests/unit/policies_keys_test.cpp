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

#include "qfilters/isa.h"
#include "qfilters/scoring.h"
#include "qfilters/sequence_cache.h"

#include "policies/scorers.h"
#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters::policies {
namespace {

using test::bits_of;
using test::budget;
using test::error_of;
using test::IsError;
using test::Model;

/// Keys of a group of the view, row by row.
std::vector<std::vector<float>> keys_of(
    const RowsView& rows, std::size_t group) {
  std::vector<std::vector<float>> out;
  std::vector<std::uint16_t> key(rows.shape().key_dim);
  for (std::size_t r = 0; r < rows.rows(group); ++r) {
    rows.read_key(group, r, key.data());
    auto& row = out.emplace_back();
    for (const std::uint16_t x : key)
      row.push_back(test::decode(rows.shape().dtype, x));
  }
  return out;
}

std::vector<double> keydiff_of(const std::vector<std::vector<float>>& keys) {
  std::vector<double> anchor(keys.front().size());
  std::vector<std::vector<double>> units;
  for (const auto& key : keys) {
    double norm = 0;
    for (const float x : key)
      norm += double{x} * x;
    auto& unit = units.emplace_back(key.begin(), key.end());
    for (std::size_t d = 0; d < unit.size(); ++d) {
      unit[d] = norm == 0 ? 0 : unit[d] / std::sqrt(norm);
      anchor[d] += unit[d];
    }
  }
  double norm = 0;
  for (const double a : anchor)
    norm += a * a;
  std::vector<double> scores;
  for (const auto& unit : units) {
    double dot = 0;
    for (std::size_t d = 0; d < unit.size(); ++d)
      dot += unit[d] * anchor[d];
    scores.push_back(norm == 0 ? 0 : -dot / std::sqrt(norm));
  }
  return scores;
}

/// Caches with `stored` rows (evicted among more) and `fresh` new ones.
class KeyPolicyTest : public ::testing::Test {
 protected:
  template <typename Check>
  void for_each_cache(const Check& check) {
    for (const RowFormat format : {RowFormat::kSame, RowFormat::kInt8}) {
      for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        for (const std::size_t dim : {1U, 17U, 64U})
          for_each_count(Model({{2, dim, 8, 0}}, 2, dtype), format, check);
      }
    }
  }

  template <typename Check>
  void for_each_count(
      const Model& model, RowFormat format, const Check& check) {
    SequenceOptions options = model.options();
    options.format = format;
    for (const std::size_t stored : {0U, 40U, 64U, 100U}) {
      for (const std::size_t fresh : {1U, 30U, 64U}) {
        SequenceCache cache(
            model.layers,
            Policy::make(
                "random", budget(std::max(stored, std::size_t{1}), 0, 0)),
            options);
        if (stored > 0) model.feed(cache, {stored + 20});
        model.append(cache, fresh);
        SCOPED_TRACE(
            std::string(to_string(format)) + " rows, " +
            to_string(model.dtype) + " dim " +
            std::to_string(model.layers[0].key_dim) + " stored " +
            std::to_string(stored) + " new " + std::to_string(fresh));
        for (std::size_t g = 0; g < 4; ++g)
          check(cache.rows(0), g);
      }
    }
  }

  static std::vector<float> rescored(
      const Scorer& scorer, const RowsView& rows, std::size_t group) {
    std::vector<float> scores(rows.rows(group), test::kNaN);
    scorer.rescore({0, group / 2, group % 2, rows}, scores);
    return scores;
  }
};

TEST_F(KeyPolicyTest, KeyDiffIsMinusTheCosineWithTheMeanOfUnitKeys) {
  const auto scorer = make_keydiff_scorer();
  for_each_cache([&](const RowsView& rows, std::size_t group) {
    const auto got = rescored(*scorer, rows, group);
    const auto want = keydiff_of(keys_of(rows, group));
    for (std::size_t r = 0; r < want.size(); ++r)
      ASSERT_NEAR(got[r], want[r], 2e-5) << "row " << r;
  });
}

TEST_F(KeyPolicyTest, KeyDiffHasTheSameBitsOnEveryInstructionSet) {
  const auto scorer = make_keydiff_scorer();
  const Model model({{2, 80, 8, 0}}, 2);
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.feed(cache, {150});
  model.append(cache, 23);
  const std::string before = active_isa();
  const auto want = bits_of(rescored(*scorer, cache.rows(0), 3));
  for (const auto& isa : runnable_isas()) {
    set_isa(isa);
    EXPECT_EQ(bits_of(rescored(*scorer, cache.rows(0), 3)), want) << isa;
  }
  set_isa(before);
}

TEST_F(KeyPolicyTest, KeyDiffOfKeysThatAreZeroIsZero) {
  Model model({{1, 16, 8, 0}});
  for (std::size_t t = 0; t < 9; ++t)
    std::ranges::fill(model.keys[0].row(0, 0, t), std::uint16_t{0});
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.append(cache, 9);
  std::vector<float> scores(9, 1.0F);
  make_keydiff_scorer()->rescore({0, 0, 0, cache.rows(0)}, scores);
  EXPECT_THAT(scores, ::testing::Each(0.0F));
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
