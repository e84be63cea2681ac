#include "io/safetensors.h"

#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"
#include "qfilters/filter_file.h"

#include "unit/filter_file_fixture.h"

namespace qfilters {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using SafetensorsTest = FilterFileTest;

TEST_F(SafetensorsTest, WritesSafetensorsNegated) {
  save_filters(FilterBank({{1, 2, {1, -2}}}, {}), folder_ / "f.safetensors");
  const std::string content = read(folder_ / "f.safetensors");
  EXPECT_THAT(content, HasSubstr(R"("sign":"negated")"));
  EXPECT_THAT(
      content,
      HasSubstr(R"("q_filters":{"data_offsets":[0,8],"dtype":"F32",)"
                R"("shape":[1,1,2]})"));
  EXPECT_TRUE(content.ends_with(bytes_of(-1.0F) + bytes_of(2.0F)));
  EXPECT_EQ(content.size() % 8, 0U);
}

TEST_F(SafetensorsTest, ReadsPublishedSafetensorsAsNegated) {
  const auto bank = load_filters(write("f.safetensors", safetensors_with("")));
  EXPECT_EQ(
      bank, FilterBank({{2, 3, {-1, 2, -3, 4, -5, 6}}}, FilterMetadata{}));
}

TEST_F(SafetensorsTest, ReadsSafetensorsOfEitherSign) {
  for (const auto& [metadata, first] :
       std::vector<std::pair<std::string, float>>{
           {R"("__metadata__":{},)", -1.0F},
           {R"("__metadata__":{"format":"pt"},)", -1.0F},
           {R"("__metadata__":{"sign":"negated"},)", -1.0F},
           {R"("__metadata__":{"sign":"positive"},)", 1.0F}}) {
    SCOPED_TRACE(metadata);
    const auto bank =
        load_filters(write("f.safetensors", safetensors_with(metadata)));
    EXPECT_EQ(bank.layer(0).values[0], first);
  }
}

TEST_F(SafetensorsTest, ReadsSafetensorsWithOtherTensors) {
  const auto bank = load_filters(write(
      "f.safetensors",
      safetensors_of(
          R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
          R"("q_filters":{"dtype":"F32","shape":[1,1,1],)"
          R"("data_offsets":[3,7]}})",
          "abc" + bytes_of(-8.0F))));
  EXPECT_EQ(bank.layer(0).values, std::vector<float>{8});
}

TEST_F(SafetensorsTest, RefusesSafetensorsMetadataOfAnotherKind) {
  for (const std::string metadata :
       {R"("__metadata__":7,)",
        R"("__metadata__":null,)",
        R"("__metadata__":{"sign":"other"},)",
        R"("__metadata__":{"sign":1},)",
        R"("__metadata__":{"model_id":[]},)",
        R"("__metadata__":{"n_samples":"-1"},)",
        R"("__metadata__":{"n_samples":"1 "},)",
        R"("__metadata__":{"n_samples":"99999999999999999999999"},)"}) {
    SCOPED_TRACE(metadata);
    safetensors_refusal(safetensors_with(metadata));
  }
}

TEST_F(SafetensorsTest, RefusesBrokenSafetensorsHeaders) {
  const auto tensor = [](const std::string& dtype,
                         const std::string& shape,
                         const std::string& offsets) {
    return R"({"q_filters":{"dtype":)" + dtype + R"(,"shape":)" + shape +
           R"(,"data_offsets":)" + offsets + "}}";
  };
  const std::string data(24, '\0');
  for (const std::string& header :
       {std::string(""),
        std::string("{"),
        std::string("[]"),
        std::string("{}"),
        std::string(60'000, '['),
        std::string(R"({"q_filters":1})"),
        std::string(R"({"q_filters":{}})"),
        std::string(
            R"({"other":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}})"),
        tensor(R"("F16")", "[1,2,3]", "[0,24]"),
        tensor("7", "[1,2,3]", "[0,24]"),
        tensor(R"("F32")", "[2,3]", "[0,24]"),
        tensor(R"("F32")", "[1,1,2,3]", "[0,24]"),
        tensor(R"("F32")", "[1,2,4]", "[0,24]"),
        tensor(R"("F32")", "[1,2,2]", "[0,24]"),
        tensor(R"("F32")", "[0,2,3]", "[0,24]"),
        tensor(R"("F32")", "[1,0,3]", "[0,24]"),
        tensor(R"("F32")", "[1,2,0]", "[0,24]"),
        tensor(R"("F32")", "[-1,-2,3]", "[0,24]"),
        tensor(R"("F32")", "[1,2.0,3]", "[0,24]"),
        tensor(R"("F32")", R"(["1",2,3])", "[0,24]"),
        tensor(R"("F32")", "[4294967296,4294967296,3]", "[0,24]"),
        tensor(R"("F32")", "[1,2,4611686018427387907]", "[0,24]"),
        tensor(R"("F32")", "[1,1,99999999999999999999999]", "[0,24]"),
        tensor(R"("F32")", "[1,2,3]", "[0,20]"),
        tensor(R"("F32")", "[1,2,3]", "[0,25]"),
        tensor(R"("F32")", "[1,2,3]", "[1,25]"),
        tensor(R"("F32")", "[1,2,3]", "[24,0]"),
        tensor(R"("F32")", "[1,2,3]", "[0]"),
        tensor(R"("F32")", "[1,2,3]", "[0,24,0]"),
        tensor(R"("F32")", "[1,2,3]", "7"),
        tensor(R"("F32")", "[1,2,3]", "[-24,0]"),
        tensor(R"("F32")", "[1,2,3]", "[0,18446744073709551615]"),
        tensor(R"("F32")", "7", "[0,24]")}) {
    SCOPED_TRACE(header.substr(0, 100));
    safetensors_refusal(safetensors_of(header, data));
  }
}

TEST_F(SafetensorsTest, RefusesSafetensorsHeadersLongerThanTheFile) {
  for (const std::uint64_t length :
       {std::uint64_t{1}, ~std::uint64_t{0}, ~std::uint64_t{0} - 7}) {
    safetensors_refusal(bytes_of(length));
  }
  safetensors_refusal(safetensors_of(std::string(1 << 20, ' '), ""));
}

TEST_F(SafetensorsTest, RefusesBytesBehindTheTensors) {
  safetensors_refusal(safetensors_with("") + "x");
}

TEST_F(SafetensorsTest, RefusesMoreSafetensorsLayersThanAnyModelHas) {
  safetensors_refusal(safetensors_of(
      R"({"q_filters":{"dtype":"F32","shape":[1000000,1,1],)"
      R"("data_offsets":[0,4000000]}})",
      std::string(4'000'000, '\0')));
}

TEST_F(SafetensorsTest, RefusesNonFiniteValuesInSafetensors) {
  EXPECT_THAT(
      safetensors_refusal(safetensors_of(
          R"({"q_filters":{"dtype":"F32","shape":[1,1,1],)"
          R"("data_offsets":[0,4]}})",
          bytes_of(std::numeric_limits<float>::quiet_NaN()))),
      HasSubstr("non-finite"));
}

TEST_F(SafetensorsTest, RefusesLayersOfDifferentShapesForSafetensors) {
  const fs::path path = folder_ / "f.safetensors";
  save_filters(some_filters(), path);
  const FilterBank bank({{1, 2, {1, 2}}, {2, 1, {3, 4}}}, {});
  EXPECT_THAT(
      message_of([&] { save_filters(bank, path); }, ErrorKind::kShape),
      AllOf(HasSubstr("[1, 2]"), HasSubstr("[2, 1]")));
  EXPECT_EQ(load_filters(path), some_filters());
}

}  // namespace
}  // namespace qfilters
