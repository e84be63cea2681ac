#include "io/gguf.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/filter_file.h"

#include "unit/filter_file_fixture.h"

namespace qfilters {
namespace {

using ::testing::HasSubstr;
using GgufTest = FilterFileTest;
using Texts = std::vector<std::string>;
constexpr const char* kLayer = "blk.0.q_filter";

template <typename T>
std::string array_of(std::uint32_t type, T count, const std::string& values) {
  return bytes_of(type) + bytes_of(std::uint64_t{count}) + values;
}

// A file with `tensors` over 32 bytes, the required fields before them.
std::string gguf_with_tensors(const Texts& tensors) {
  return gguf_of(gguf_fields(), tensors, gguf_data({1, -2, 3, -4}));
}

TEST_F(GgufTest, WritesTensorsOfDimByHeadsAfterItsMetadata) {
  FilterMetadata metadata;
  metadata.model_id = "m";
  metadata.model_fingerprint = "f";
  metadata.query_site = "attention";
  metadata.dataset = "d";
  metadata.text_hash = "h";
  metadata.n_samples = 7;
  save_filters(
      FilterBank({{2, 3, {1, 2, 3, 4, 5, 6}}, {1, 2, {7, 8}}}, metadata),
      folder_ / "f.gguf");
  EXPECT_EQ(
      read(folder_ / "f.gguf"),
      gguf_of(
          {gguf_string("general.architecture", "qfilters"),
           gguf_field("general.alignment", 4, bytes_of(std::uint32_t{32})),
           gguf_field("qfilters.version", 4, bytes_of(std::uint32_t{1})),
           gguf_string("qfilters.sign", "positive"),
           gguf_string("qfilters.model_id", "m"),
           gguf_string("qfilters.model_fingerprint", "f"),
           gguf_string("qfilters.query_site", "attention"),
           gguf_string("qfilters.dataset", "d"),
           gguf_string("qfilters.text_hash", "h"),
           gguf_field("qfilters.n_samples", 10, bytes_of(std::uint64_t{7}))},
          {gguf_tensor("blk.0.q_filter", {3, 2}, 0),
           gguf_tensor("blk.1.q_filter", {2, 1}, 32)},
          gguf_data({1, 2, 3, 4, 5, 6}) + gguf_data({7, 8})));
}

TEST_F(GgufTest, KeepsLayersOfDifferentShapes) {
  const FilterBank bank(
      {{1, 2, {1, 2}}, {2, 1, {3, 4}}, {3, 3, std::vector<float>(9, 5)}}, {});
  save_filters(bank, folder_ / "f.gguf");
  EXPECT_EQ(load_filters(folder_ / "f.gguf"), bank);
}

TEST_F(GgufTest, ReadsAFileWithoutOptionalMetadata) {
  const auto bank = load_filters(write("f.gguf", gguf_with({})));
  EXPECT_EQ(bank, FilterBank({{2, 2, {1, -2, 3, -4}}}, FilterMetadata{}));
}

TEST_F(GgufTest, SkipsMetadataOfOthers) {
  std::vector<std::string> fields;
  const std::vector<std::size_t> sizes = {1, 1, 2, 2, 4, 4, 4, 1};
  for (std::uint32_t type = 0; type < sizes.size(); ++type) {
    fields.push_back(gguf_field("x", type, std::string(sizes[type], '\1')));
  }
  for (const std::uint32_t type : {10U, 11U, 12U}) {
    fields.push_back(gguf_field("x", type, std::string(8, '\1')));
  }
  fields.push_back(gguf_string("general.name", std::string(70'000, 'n')));
  fields.push_back(gguf_field(
      "texts", 9, array_of(8, 2U, gguf_text("one") + gguf_text("two"))));
  fields.push_back(
      gguf_field("bytes", 9, array_of(0, 5000U, std::string(5000, 'b'))));
  fields.push_back(gguf_field("none", 9, array_of(12, 0U, "")));
  fields.push_back(gguf_string("qfilters.dataset", "d"));
  const auto bank = load_filters(write("f.gguf", gguf_with(fields)));
  EXPECT_EQ(bank.metadata().dataset, "d");
  EXPECT_EQ(bank.layer(0).values[3], -4);
}

TEST_F(GgufTest, ReadsAnyAlignment) {
  for (const std::size_t alignment : {1U, 8U, 16U, 64U, 4096U}) {
    SCOPED_TRACE(alignment);
    Texts fields = gguf_fields();
    fields.push_back(gguf_field(
        "general.alignment",
        4,
        bytes_of(static_cast<std::uint32_t>(alignment))));
    const std::size_t padded = (16 + alignment - 1) / alignment * alignment;
    std::string data = gguf_data({1, -2, 3, -4}).substr(0, 16);
    data.resize(padded);
    data += data;
    const auto bank = load_filters(write(
        "f.gguf",
        gguf_of(
            fields,
            {gguf_tensor("blk.0.q_filter", {4, 1}, 0),
             gguf_tensor("blk.1.q_filter", {2, 2}, padded)},
            data,
            alignment)));
    EXPECT_EQ(bank.layer(0), (LayerFilters{1, 4, {1, -2, 3, -4}}));
    EXPECT_EQ(bank.layer(1), (LayerFilters{2, 2, {1, -2, 3, -4}}));
  }
}

TEST_F(GgufTest, RefusesAlignmentsThatAreNoPowerOfTwo) {
  for (const std::uint32_t alignment : {0U, 3U, 24U, ~0U}) {
    EXPECT_THAT(
        gguf_refusal(gguf_with(
            {gguf_field("general.alignment", 4, bytes_of(alignment))})),
        HasSubstr("power of two"));
  }
  gguf_refusal(gguf_with(
      {gguf_field("general.alignment", 4, bytes_of(std::uint32_t{1U << 31}))}));
}

TEST_F(GgufTest, NamesTheArchitectureOfAModel) {
  EXPECT_THAT(
      gguf_refusal(gguf_of(
          {gguf_string("general.architecture", "llama")},
          {gguf_tensor("token_embd.weight", {2, 2}, 0)},
          gguf_data({}))),
      HasSubstr("architecture is 'llama'"));
}

TEST_F(GgufTest, RefusesOtherContainersAndByteOrders) {
  const std::string good = gguf_with({});
  for (const std::uint32_t version : {0U, 1U, 2U, 4U, 3U << 24}) {
    std::string file = good;
    file.replace(4, 4, bytes_of(version));
    EXPECT_THAT(gguf_refusal(file), HasSubstr(std::to_string(version)));
  }
  EXPECT_THAT(gguf_refusal("ggml" + good.substr(4)), HasSubstr("no GGUF"));
}

TEST_F(GgufTest, RefusesMissingRequiredMetadata) {
  const Texts all = gguf_fields();
  for (std::size_t left_out = 0; left_out < all.size(); ++left_out) {
    SCOPED_TRACE(left_out);
    Texts fields = all;
    fields.erase(fields.begin() + static_cast<std::ptrdiff_t>(left_out));
    gguf_refusal(gguf_of(
        fields, {gguf_tensor(kLayer, {2, 2}, 0)}, gguf_data({1, 2, 3, 4})));
  }
}

TEST_F(GgufTest, RefusesBrokenMetadata) {
  const std::string word(4, '\1');
  for (const auto& [field, says] :
       std::vector<std::pair<std::string, std::string>>{
           {gguf_string("qfilters.sign", "positive"), "appears twice"},
           {gguf_field("qfilters.dataset", 4, word), "type 4"},
           {gguf_field("qfilters.n_samples", 4, word), "type 4"},
           {gguf_field("qfilters.n_samples", 8, gguf_text("7")), "type 8"},
           {gguf_field("x", 13, word), "unknown type 13"},
           {gguf_field("x", ~0U, word), "unknown type"},
           {gguf_field("x", 9, array_of(13, 1U, word)), "unknown type 13"},
           {gguf_field("x", 9, array_of(9, 1U, array_of(0, 1U, "x"))),
            "array of arrays"},
           {gguf_field("x", 9, array_of(0, ~std::uint64_t{0}, "x")),
            "18446744073709551615"},
           {gguf_field("x", 9, array_of(12, ~std::uint64_t{0} / 8 + 2, "x")),
            "an array of"},
           {gguf_field("x", 9, array_of(8, ~std::uint64_t{0}, "")), "trunc"},
           {gguf_field("x", 8, bytes_of(~std::uint64_t{0})), "truncated"},
           {gguf_field("qfilters.dataset", 8, bytes_of(~std::uint64_t{0})),
            "text of"},
           {gguf_field("qfilters.dataset", 8, bytes_of(std::uint64_t{60'000})),
            "truncated"},
           {gguf_string("qfilters.dataset", std::string(65536, 'x')),
            "65536 bytes"},
           {gguf_string(std::string(65536, 'k'), "x"), "65536 bytes"},
           {gguf_string("qfilters.dataset", "na\xEFve"), "is no UTF-8"},
           {bytes_of(~std::uint64_t{0}), "text of"}}) {
    EXPECT_THAT(gguf_refusal(gguf_with({field})), HasSubstr(says));
  }
  for (const char* sign : {"", "Positive", "1"}) {
    gguf_refusal(gguf_of(
        {gguf_fields()[0],
         gguf_fields()[1],
         gguf_string("qfilters.sign", sign)},
        {gguf_tensor(kLayer, {2, 2}, 0)},
        gguf_data({1, 2, 3, 4})));
  }
}

TEST_F(GgufTest, RefusesAnotherVersionOfTheLayout) {
  EXPECT_THAT(
      gguf_refusal(gguf_of(
          {gguf_fields()[0],
           gguf_field("qfilters.version", 4, bytes_of(std::uint32_t{2})),
           gguf_fields()[2]},
          {gguf_tensor(kLayer, {2, 2}, 0)},
          gguf_data({1, 2, 3, 4}))),
      HasSubstr("qfilters.version 2 is not 1"));
}

TEST_F(GgufTest, RefusesCountsThatTheFileCannotHold) {
  for (const std::size_t at : {8U, 16U}) {  // tensors, fields
    for (const std::uint64_t count :
         {std::uint64_t{0},
          std::uint64_t{100},
          std::uint64_t{1} << 40,
          ~std::uint64_t{0}}) {
      std::string file = gguf_with({});
      file.replace(at, 8, bytes_of(count));
      gguf_refusal(file);
    }
  }
}

TEST_F(GgufTest, RefusesOtherTensors) {
  constexpr std::uint64_t kHuge = std::uint64_t{1} << 62;
  for (const Texts& tensors : std::vector<Texts>{
           {},
           {gguf_tensor("blk.1.q_filter", {2, 2}, 0)},
           {gguf_tensor("blk.00.q_filter", {2, 2}, 0)},
           {gguf_tensor("", {2, 2}, 0)},
           {gguf_tensor(std::string(70, 'x'), {2, 2}, 0)},
           {gguf_tensor(kLayer, {2, 2}, 0), gguf_tensor(kLayer, {2, 2}, 0)},
           {gguf_tensor(kLayer, {2, 2}, 0), gguf_tensor(kLayer, {2, 2}, 32)},
           {gguf_tensor(kLayer, {2, 2}, 0),
            gguf_tensor("blk.1.q_filter", {2, 2}, 0)},
           {gguf_tensor(kLayer, {2, 2}, 0),
            gguf_tensor("blk.1.q_filter", {2, 2}, 16)},
           {gguf_tensor(kLayer, {2, 2}, 0),
            gguf_tensor("blk.1.q_filter", {2, 2}, 32)},
           {gguf_tensor(kLayer, {}, 0)},
           {gguf_tensor(kLayer, {4}, 0)},
           {gguf_tensor(kLayer, {2, 2, 1}, 0)},
           {gguf_tensor(kLayer, std::vector<std::uint64_t>(2000, 1), 0)},
           {gguf_tensor(kLayer, {0, 2}, 0)},
           {gguf_tensor(kLayer, {2, 0}, 0)},
           {gguf_tensor(kLayer, {3, 3}, 0)},
           {gguf_tensor(kLayer, {kHuge, 1}, 0)},
           {gguf_tensor(kLayer, {kHuge, 4}, 0)},
           {gguf_tensor(kLayer, {1ULL << 32, 1ULL << 32}, 0)},
           {gguf_tensor(kLayer, {~0ULL, ~0ULL}, 0)},
           {gguf_tensor(kLayer, {2, 2}, 8)},
           {gguf_tensor(kLayer, {2, 2}, ~0ULL)},
           {gguf_tensor(kLayer, {2, 2}, 0, 1)},
           {gguf_tensor(kLayer, {2, 2}, 0, 30)}}) {
    SCOPED_TRACE(::testing::PrintToString(tensors).substr(0, 200));
    gguf_refusal(gguf_with_tensors(tensors));
  }
}

TEST_F(GgufTest, RefusesBytesBehindTheTensors) {
  EXPECT_THAT(gguf_refusal(gguf_with({}) + "x"), HasSubstr("1 bytes follow"));
}

TEST_F(GgufTest, RefusesNonFiniteValues) {
  EXPECT_THAT(
      gguf_refusal(gguf_of(
          gguf_fields(),
          {gguf_tensor(kLayer, {2, 2}, 0)},
          gguf_data({1, 2, std::numeric_limits<float>::infinity(), 4}))),
      HasSubstr("non-finite"));
}

}  // namespace
}  // namespace qfilters
