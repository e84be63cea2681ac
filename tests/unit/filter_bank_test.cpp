#include "qfilters/filter_bank.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"

namespace qfilters {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ErrorKind kind_of(const std::vector<LayerFilters>& layers) {
  try {
    const FilterBank bank(layers, {});
  } catch (const Error& error) {
    return error.kind();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorKind::kRuntime;
}

std::vector<LayerFilters> two_layers() {
  return {{2, 3, {1, 2, 3, 4, 5, 6}}, {1, 2, {7, 8}}};
}

TEST(FilterBankTest, HoldsLayersOfAnyShape) {
  FilterMetadata metadata;
  metadata.model_id = "a model";
  const FilterBank bank(two_layers(), metadata);
  EXPECT_EQ(bank.layers(), 2U);
  EXPECT_EQ(bank.layer(1), two_layers()[1]);
  EXPECT_EQ(bank.metadata(), metadata);
}

TEST(FilterBankTest, GivesTheFilterOfAHead) {
  const FilterBank bank(two_layers(), {});
  const auto head = bank.layer(0).head(1);
  EXPECT_THAT(
      std::vector<float>(head.begin(), head.end()), ElementsAre(4, 5, 6));
}

TEST(FilterBankTest, ComparesFiltersAndMetadata) {
  FilterMetadata other;
  other.n_samples = 1;
  EXPECT_EQ(FilterBank(two_layers(), {}), FilterBank(two_layers(), {}));
  EXPECT_NE(FilterBank(two_layers(), {}), FilterBank(two_layers(), other));
  EXPECT_NE(FilterBank(two_layers(), {}), FilterBank({two_layers()[0]}, {}));
}

TEST(FilterBankTest, RejectsNoLayers) {
  EXPECT_EQ(kind_of({}), ErrorKind::kShape);
}

TEST(FilterBankTest, RejectsAnEmptyLayer) {
  EXPECT_EQ(kind_of({{0, 3, {}}}), ErrorKind::kShape);
  EXPECT_EQ(kind_of({{3, 0, {}}}), ErrorKind::kShape);
}

TEST(FilterBankTest, RejectsASizeThatIsNotHeadsTimesDim) {
  EXPECT_EQ(kind_of({{2, 3, {1, 2, 3, 4, 5}}}), ErrorKind::kShape);
  EXPECT_EQ(kind_of({{2, 3, {}}}), ErrorKind::kShape);
  EXPECT_EQ(kind_of({{2, 3, {1, 2, 3, 4, 5, 6, 7, 8, 9}}}), ErrorKind::kShape);
}

TEST(FilterBankTest, RejectsAShapeWhoseProductOverflows) {
  constexpr std::size_t kHuge = std::size_t{1} << 63;
  EXPECT_EQ(kind_of({{kHuge, 2, {}}}), ErrorKind::kShape);
  EXPECT_EQ(kind_of({{2, kHuge, {}}}), ErrorKind::kShape);
}

TEST(FilterBankTest, RejectsNonFiniteValues) {
  using Limits = std::numeric_limits<float>;
  for (const float value :
       {Limits::quiet_NaN(), Limits::infinity(), -Limits::infinity()}) {
    EXPECT_EQ(kind_of({{1, 2, {0, value}}}), ErrorKind::kInvalidArgument);
  }
}

TEST(FilterBankTest, NamesLayerAndHeadOfABadValue) {
  try {
    const FilterBank bank(
        {{1, 1, {0}}, {2, 1, {0, std::numeric_limits<float>::infinity()}}}, {});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("layer 1"));
    EXPECT_THAT(error.what(), HasSubstr("head 1"));
    EXPECT_THAT(error.what(), HasSubstr("inf"));
  }
}

TEST(FilterBankTest, RejectsALayerThatDoesNotExist) {
  const FilterBank bank(two_layers(), {});
  try {
    static_cast<void>(bank.layer(2));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("index=2"));
  }
}

TEST(FilterBankTest, HasAFingerprintThatNeverChanges) {
  // FNV-1a 64 over the little-endian bytes of 2; 2, 3, 1.0f ... 6.0f; 1, 2,
  // 7.0f, 8.0f, counts as 64 bits. Cache files depend on it.
  EXPECT_EQ(FilterBank(two_layers(), {}).fingerprint(), "a656057e6fd8bf27");
}

TEST(FilterBankTest, HasTheSameFingerprintWhateverTheMetadata) {
  FilterMetadata metadata;
  metadata.dataset = "another text";
  EXPECT_EQ(
      FilterBank(two_layers(), {}).fingerprint(),
      FilterBank(two_layers(), metadata).fingerprint());
}

TEST(FilterBankTest, HasAnotherFingerprintForOtherValuesOrShapes) {
  const FilterBank bank({{2, 3, {1, 2, 3, 4, 5, 6}}}, {});
  const std::vector<FilterBank> others = {
      FilterBank({{2, 3, {1, 2, 3, 4, 5, 7}}}, {}),
      FilterBank({{3, 2, {1, 2, 3, 4, 5, 6}}}, {}),
      FilterBank({{1, 3, {1, 2, 3}}, {1, 3, {4, 5, 6}}}, {})};
  for (const FilterBank& other : others) {
    EXPECT_NE(bank.fingerprint(), other.fingerprint());
  }
}

TEST(CheckOriginTest, ComparesWhatIsExpectedAndKnown) {
  FilterMetadata known;
  known.model_id = "m";
  known.model_fingerprint = "f";
  const FilterMetadata unknown;
  EXPECT_NO_THROW(check_origin(known, {}));
  EXPECT_NO_THROW(
      check_origin(known, {.model_id = "m", .model_fingerprint = "f"}));
  EXPECT_NO_THROW(
      check_origin(unknown, {.model_id = "", .model_fingerprint = "f"}));
  EXPECT_THROW(check_origin(known, {.model_id = ""}), Error);
  EXPECT_THROW(check_origin(known, {.model_fingerprint = ""}), Error);
  EXPECT_THROW(check_origin(unknown, {.model_id = "m"}), Error);
}

}  // namespace
}  // namespace qfilters
