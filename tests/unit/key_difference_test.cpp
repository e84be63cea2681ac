#include "qfilters/key_difference.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/isa.h"
#include "qfilters/sequence_cache.h"

#include "unit/rescore_fixture.h"
#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using test::bits_of;
using test::error_of;
using test::IsError;
using test::keydiff_of;
using test::keys_of;
using test::Model;

using KeyDifferenceTest = test::RescoreTest;

std::vector<float> differences_of(const RowsView& rows, std::size_t group) {
  std::vector<float> out(rows.rows(group), test::kNaN);
  key_differences(rows, group, out);
  return out;
}

TEST_F(KeyDifferenceTest, IsMinusTheCosineWithTheMeanOfUnitKeys) {
  for_each_cache([&](const RowsView& rows, std::size_t group) {
    const auto got = differences_of(rows, group);
    const auto want = keydiff_of(keys_of(rows, group));
    for (std::size_t r = 0; r < want.size(); ++r)
      ASSERT_NEAR(got[r], want[r], 2e-5) << "row " << r;
  });
}

TEST_F(KeyDifferenceTest, HasTheSameBitsOnEveryInstructionSet) {
  const Model model({{2, 80, 8, 0}}, 2);
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.feed(cache, {150});
  model.append(cache, 23);
  const std::string before = active_isa();
  const auto want = bits_of(differences_of(cache.rows(0), 3));
  for (const auto& isa : runnable_isas()) {
    set_isa(isa);
    EXPECT_EQ(bits_of(differences_of(cache.rows(0), 3)), want) << isa;
  }
  set_isa(before);
}

TEST_F(KeyDifferenceTest, OfKeysThatAreZeroIsZero) {
  Model model({{1, 16, 8, 0}});
  for (std::size_t t = 0; t < 9; ++t)
    std::ranges::fill(model.keys[0].row(0, 0, t), std::uint16_t{0});
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.append(cache, 9);
  EXPECT_THAT(differences_of(cache.rows(0), 0), ::testing::Each(0.0F));
}

// In a full block and behind it.
TEST_F(KeyDifferenceTest, OfKeysWithoutALengthIsNaNAndChangesNoOther) {
  constexpr std::uint16_t kInfinity = 0x7F80;
  constexpr std::uint16_t kNaN = 0x7FC0;
  constexpr std::uint16_t kHuge = 0x7F00;  // finite, its square is not
  Model model({{1, 17, 8, 0}}, 1, DType::kBFloat16);
  std::ranges::fill(model.keys[0].row(0, 0, 5).first(4), kHuge);
  model.keys[0].row(0, 0, 6)[0] = kInfinity;
  model.keys[0].row(0, 0, 70)[16] = kNaN;
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.feed(cache, {68});
  model.append(cache, 6);
  auto got = differences_of(cache.rows(0), 0);
  auto keys = keys_of(cache.rows(0), 0);
  for (const std::ptrdiff_t odd : {70, 6, 5}) {
    EXPECT_TRUE(std::isnan(got[static_cast<std::size_t>(odd)])) << odd;
    got.erase(got.begin() + odd);
    keys.erase(keys.begin() + odd);
  }
  const auto want = keydiff_of(keys);
  for (std::size_t r = 0; r < want.size(); ++r)
    EXPECT_NEAR(got[r], want[r], 2e-5) << "row " << r;
}

TEST_F(KeyDifferenceTest, NeedsRoomForAllRows) {
  const Model& model = test::two_layers();
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.feed(cache, {10});
  std::vector<float> out(9);
  EXPECT_THAT(
      error_of([&] { key_differences(cache.rows(0), 0, out); }),
      IsError(ErrorKind::kShape, "key differences: room for 9 values, not 10"));
}

}  // namespace
}  // namespace qfilters
