#include "io/npz.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
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

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using NpzTest = FilterFileTest;

TEST_F(NpzTest, WritesNpzMembersAsNumpyDoes) {
  FilterMetadata metadata;
  metadata.model_id = "m\u00f6del";
  metadata.n_samples = 3;
  metadata.dataset = "x";
  const FilterBank bank({{1, 2, {1, 2}}, {2, 1, {3, 4}}}, metadata);
  save_filters(bank, folder_ / "f.npz");
  const std::string content = read(folder_ / "f.npz");
  const std::string meta =
      meta_npy(R"({"version": 1, "model_id": "m\u00f6del", "n_layers": 2, )"
               R"("n_samples": 3, "dataset": "x", "model_fingerprint": "", )"
               R"("query_site": "", "text_hash": ""})");
  const auto layer_0 =
      npy_of("<f4", "(1, 2)", bytes_of_all(std::vector<float>{1, 2}));
  const auto layer_1 =
      npy_of("<f4", "(2, 1)", bytes_of_all(std::vector<float>{3, 4}));
  const std::size_t at = content.find("__meta__.npy" + meta);
  ASSERT_NE(at, std::string::npos);
  ASSERT_NE(content.find("layer_0.npy" + layer_0, at), std::string::npos);
  ASSERT_NE(content.find("layer_1.npy" + layer_1, at), std::string::npos);
}

TEST_F(NpzTest, KeepsLayersOfDifferentShapesInNpz) {
  const FilterBank bank({{1, 2, {1, 2}}, {2, 1, {3, 4}}, {1, 1, {5}}}, {});
  save_filters(bank, folder_ / "f.npz");
  EXPECT_EQ(load_filters(folder_ / "f.npz"), bank);
}

TEST_F(NpzTest, ReadsNpzMetadataOfTheReference) {
  const auto bank = load_filters(write(
      "f.npz",
      npz_with_meta(R"({"version": "1", "model_id": "m", "n_layers": 1.0,)"
                    R"( "n_samples": 5, "dataset": "d"})")));
  FilterMetadata expected;
  expected.model_id = "m";
  expected.n_samples = 5;
  expected.dataset = "d";
  EXPECT_EQ(bank.metadata(), expected);
}

TEST_F(NpzTest, ReadsNpzWithoutOptionalMetadata) {
  const auto bank = load_filters(write("f.npz", npz_with_meta(kOneLayer)));
  EXPECT_EQ(bank.metadata(), FilterMetadata{});
}

TEST_F(NpzTest, IgnoresOtherMembersOfNpz) {
  const auto bank = load_filters(write(
      "f.npz",
      zip_of(
          {{"readme.txt", "hello"},
           {"layer_1.npy", "no array"},
           {"layer_0.npy", layer_npy(2, 3)},
           {"__meta__.npy", meta_npy(kOneLayer)}})));
  EXPECT_EQ(bank.layers(), 1U);
}

TEST_F(NpzTest, ReadsEveryFloatTypeAndOrderOfNpz) {
  const std::vector<float> values = {0.5F, -1.5F, 65504, -0.0F, 0x1p-24F, 3};
  const std::vector<std::uint16_t> halves = {
      0x3800, 0xBE00, 0x7BFF, 0x8000, 0x0001, 0x4200};
  const std::string singles = bytes_of_all(values);
  const std::string doubles =
      bytes_of_all(std::vector<double>(values.begin(), values.end()));
  const auto swapped = [](std::string bytes, std::ptrdiff_t size) {
    for (auto at = bytes.begin(); at != bytes.end(); at += size) {
      std::reverse(at, at + size);
    }
    return bytes;
  };
  // The transposed order of [2, 3].
  const std::vector<float> columns = {
      values[0], values[3], values[1], values[4], values[2], values[5]};
  const std::array<std::string, 7> members = {
      npy_of("<f4", "(2, 3)", singles),
      npy_of(">f4", "(2, 3)", swapped(singles, 4)),
      npy_of("<f8", "(2, 3)", doubles),
      npy_of(">f8", "(2, 3)", swapped(doubles, 8)),
      npy_of("<f2", "(2,3)", bytes_of_all(halves)),
      npy_of(">f2", "(2, 3)", swapped(bytes_of_all(halves), 2)),
      npy_of("<f4", "(2, 3)", bytes_of_all(columns), true)};
  for (const std::string& member : members) {
    SCOPED_TRACE(member.substr(0, 70));
    const auto bank = load_filters(write("f.npz", npz_with_layer(member)));
    EXPECT_EQ(bits_of(bank.layer(0)), bits_of({2, 3, values}));
  }
}

TEST_F(NpzTest, ReadsEveryIntegerTypeOfNpz) {
  const std::string shape = "(2, 1)";
  for (const std::string& member :
       {npy_of("|i1", shape, "\x01\x03"),
        npy_of("|u1", shape, "\x01\x03"),
        npy_of("<i2", shape, bytes_of_all(std::vector<std::int16_t>{1, 3})),
        npy_of(">u2", shape, std::string("\0\1\0\3", 4)),
        npy_of("<u4", shape, bytes_of_all(std::vector<std::uint32_t>{1, 3})),
        npy_of("<i8", shape, bytes_of_all(std::vector<std::int64_t>{1, 3}))}) {
    SCOPED_TRACE(member.substr(0, 70));
    const auto bank = load_filters(write("f.npz", npz_with_layer(member)));
    EXPECT_EQ(bank.layer(0), (LayerFilters{2, 1, {1, 3}}));
  }
}

TEST_F(NpzTest, ReadsLayersOfManyReadsInEitherOrder) {
  constexpr std::size_t kHeads = 40;
  constexpr std::size_t kDim = 129;
  std::vector<std::int16_t> rows;
  std::vector<std::int16_t> columns;
  for (std::size_t i = 0; i < kHeads * kDim; ++i) {
    rows.push_back(static_cast<std::int16_t>(i));
    columns.push_back(
        static_cast<std::int16_t>(i % kHeads * kDim + i / kHeads));
  }
  for (const bool fortran : {false, true}) {
    const auto bank = load_filters(write(
        "f.npz",
        npz_with_layer(npy_of(
            "<i2",
            "(40, 129)",
            bytes_of_all(fortran ? columns : rows),
            fortran))));
    EXPECT_EQ(
        bank.layer(0).values, std::vector<float>(rows.begin(), rows.end()));
  }
}

TEST_F(NpzTest, ReadsDeflatedMembersOfNpz) {
  const auto bank = load_filters(write(
      "f.npz",
      zip_of(
          {{"__meta__.npy", meta_npy(kOneLayer), 8},
           {"layer_0.npy", layer_npy(2, 3), 8}})));
  EXPECT_EQ(bank.layer(0).values, std::vector<float>(6, 0.5F));
}

TEST_F(NpzTest, ReadsEveryVersionOfTheNpyHeader) {
  for (const char version : {'\2', '\3'}) {
    std::string npy = layer_npy(2, 3);
    npy[6] = version;
    npy.insert(10, 2, '\0');  // the length takes four bytes
    const auto bank = load_filters(write("f.npz", npz_with_layer(npy)));
    EXPECT_EQ(bank.layer(0).heads, 2U);
  }
}

TEST_F(NpzTest, ReadsBigEndianMetadataOfNpz) {
  const std::string json = kOneLayer;
  std::string data;
  for (const char c : json) {
    data += std::string("\0\0\0", 3) + c;
  }
  const auto bank = load_filters(write(
      "f.npz",
      zip_of(
          {{"__meta__.npy",
            npy_of(">U" + std::to_string(json.size()), "()", data)},
           {"layer_0.npy", layer_npy(2, 3)}})));
  EXPECT_EQ(bank.layers(), 1U);
}

TEST_F(NpzTest, RefusesBrokenNpzMetadata) {
  for (const std::string json :
       {"",
        "{oops",
        "[]",
        "1",
        "null",
        "{}",
        R"({"n_layers": 1})",
        R"({"version": 2, "n_layers": 1})",
        R"({"version": -1, "n_layers": 1})",
        R"({"version": null, "n_layers": 1})",
        R"({"version": true, "n_layers": 1})",
        R"({"version": "1x", "n_layers": 1})",
        R"({"version": 1})",
        R"({"version": 1, "n_layers": 0})",
        R"({"version": 1, "n_layers": -1})",
        R"({"version": 1, "n_layers": 2})",
        R"({"version": 1, "n_layers": 1e300})",
        R"({"version": 1, "n_layers": 18446744073709551615})",
        R"({"version": 1, "n_layers": 1, "model_id": 7})",
        R"({"version": 1, "n_layers": 1, "n_samples": -7})",
        R"({"version": 1, "n_layers": 1, "dataset": ["x"]})"}) {
    SCOPED_TRACE(json);
    npz_refusal(npz_with_meta(json));
  }
  npz_refusal(npz_with_meta(std::string(60'000, '[')));
  npz_refusal(npz_with_meta(std::string(70'000, ' ') + kOneLayer));
}

TEST_F(NpzTest, RefusesNpzMetadataThatIsNoText) {
  const std::string layer = layer_npy(2, 3);
  for (const std::string& meta :
       {layer,
        npy_of("<U2", "()", "{}"),
        npy_of("<U2", "(1,)", bytes_of_all(std::vector<char32_t>{'{', '}'})),
        npy_of("<U1", "()", bytes_of(std::uint32_t{0x110000})),
        npy_of("<U1", "()", bytes_of(std::uint32_t{0xFFFFFFFF})),
        npy_of("|S2", "()", "{}"),
        npy_of("|O", "()", "pickle")}) {
    SCOPED_TRACE(meta.substr(0, 70));
    npz_refusal(zip_of({{"__meta__.npy", meta}, {"layer_0.npy", layer}}));
  }
}

TEST_F(NpzTest, NamesTheMissingMemberOfNpz) {
  EXPECT_THAT(
      npz_refusal(zip_of({{"layer_0.npy", layer_npy(2, 3)}})),
      HasSubstr("__meta__"));
  EXPECT_THAT(
      npz_refusal(zip_of(
          {{"__meta__.npy", meta_npy(R"({"version": 1, "n_layers": 2})")},
           {"layer_0.npy", layer_npy(2, 3)},
           {"layer_2.npy", layer_npy(2, 3)}})),
      HasSubstr("layer_1"));
}

TEST_F(NpzTest, RefusesAnotherRankTypeOrShapeInNpz) {
  const std::string data(24, '\0');
  for (const std::string& npy :
       {npy_of("<f4", "()", data),
        npy_of("<f4", "(6,)", data),
        npy_of("<f4", "(1, 2, 3)", data),
        npy_of("<f4", "(2, 4)", data),
        npy_of("<f4", "(2, 2)", data),
        npy_of("<f4", "(0, 3)", ""),
        npy_of("<f4", "(2, 0)", ""),
        npy_of("<f4", "(-2, -3)", data),
        npy_of("<f4", "(2, 3", data),
        npy_of("<f4", "(4294967296, 4294967296)", ""),
        npy_of("<f4", "(9223372036854775808, 2)", ""),
        npy_of("<f4", "(99999999999999999999999, 2)", data),
        npy_of("<f4", "(2305843009213693952, 6)", data),
        npy_of("<f4", "(True, 6)", data),
        npy_of("<f4", "('2', 3)", data),
        npy_of("<i3", "(2, 3)", data),
        npy_of("<f1", "(2, 3)", data),
        npy_of("<c8", "(1, 3)", data),
        npy_of("f4", "(2, 3)", data),
        npy_of("", "(2, 3)", data),
        npy_of("|O", "(2, 3)", data),
        std::string("PK"),
        std::string("\x93NUMPY\1\0\xFF\xFF{", 11),
        std::string("\x93NUMPY\2\0\xFF\xFF\xFF\xFF{", 13),
        std::string("\x93NUMPY\4\0v\0{", 11),
        npy_of("<f4", "(2, 3), 'extra': 1", data)}) {
    SCOPED_TRACE(npy.substr(0, 90));
    npz_refusal(npz_with_layer(npy));
  }
}

TEST_F(NpzTest, RefusesNonFiniteValuesInNpz) {
  using Limits = std::numeric_limits<float>;
  for (const float value : {Limits::quiet_NaN(), -Limits::infinity()}) {
    const auto data = bytes_of_all(std::vector<float>{1, value});
    EXPECT_THAT(
        npz_refusal(npz_with_layer(npy_of("<f4", "(1, 2)", data))),
        HasSubstr("non-finite"));
  }
  npz_refusal(
      npz_with_layer(npy_of("<f2", "(1, 1)", std::string("\0\x7C", 2))));
  // Finite, but not as float32.
  npz_refusal(npz_with_layer(npy_of("<f8", "(1, 1)", bytes_of(1e300))));
}

TEST_F(NpzTest, RefusesSizesThatTheNpzCannotHold) {
  const Member meta{"__meta__.npy", meta_npy(kOneLayer)};
  const std::string huge = npy_of("<f4", "(16384, 65535)", "");
  const auto claim =
      static_cast<std::uint32_t>(std::uint64_t{16384} * 65535 * 4 + 128);
  for (const std::uint16_t method : {std::uint16_t{0}, std::uint16_t{8}}) {
    SCOPED_TRACE(method);
    EXPECT_THAT(
        npz_refusal(zip_of({meta, {"layer_0.npy", huge, method, claim}})),
        HasSubstr("layer_0"));
  }
  // Deflate, but what follows is shorter or longer than claimed.
  npz_refusal(zip_of({meta, {"layer_0.npy", layer_npy(2, 3), 8, 153}}));
  npz_refusal(zip_of({meta, {"layer_0.npy", layer_npy(2, 3), 8, 140}}));
  npz_refusal(zip_of({meta, {"layer_0.npy", layer_npy(2, 3), 8, 1}}));
}

TEST_F(NpzTest, RefusesNpzMembersThatShareTheirBytes) {
  std::string meta = R"({"version": 1, "n_layers": 9})";
  std::string archive = zip_of(
      {{"__meta__.npy", meta_npy(meta)}, {"layer_0.npy", layer_npy(99, 99)}});
  // Repeat the directory's entry of layer_0 under eight more names.
  const std::size_t entry = archive.rfind("PK\1\2");
  const std::size_t end = archive.rfind("PK\5\6");
  const std::string original = archive.substr(entry, end - entry);
  std::string entries;
  for (char digit = '1'; digit <= '8'; ++digit) {
    entries += original.substr(0, original.size() - 5) + digit + ".npy";
  }
  archive.insert(end, entries);
  const std::size_t tail = end + entries.size();
  archive[tail + 8] = archive[tail + 10] = 10;
  std::uint32_t size = 0;
  std::memcpy(&size, &archive[tail + 12], 4);
  size += static_cast<std::uint32_t>(entries.size());
  std::memcpy(&archive[tail + 12], &size, 4);
  EXPECT_THAT(npz_refusal(archive), HasSubstr("layer_1"));
}

TEST_F(NpzTest, RefusesAHugeZipDirectory) {
  std::vector<Member> members(5000);  // nameless and empty
  EXPECT_THAT(npz_refusal(zip_of(members)), HasSubstr("directory"));
  const std::string zip64 =
      "PK\6\7" + std::string(16, '\0') + "PK\5\6" + std::string(18, '\xFF');
  EXPECT_THAT(npz_refusal(zip64), HasSubstr("zip64"));
}

TEST_F(NpzTest, RefusesOtherZipMethods) {
  for (const int method : {12, 14, 93, 99, 1000}) {
    SCOPED_TRACE(method);
    npz_refusal(zip_of(
        {{"__meta__.npy", meta_npy(kOneLayer)},
         {"layer_0.npy",
          layer_npy(2, 3),
          static_cast<std::uint16_t>(method)}}));
  }
}

// Files that the reference system wrote.
class ReferenceFileTest : public FilterFileTest {
 protected:
  void SetUp() override {
    FilterFileTest::SetUp();
    if (!fs::exists(artifacts_)) {
      GTEST_SKIP() << artifacts_ << " is not there";
    }
  }

  fs::path artifacts_ = QFILTERS_SOURCE_DIR "/../shared/golden/artifacts";
};

TEST_F(ReferenceFileTest, ReadsEveryGoodFile) {
  // CRC-32 of each layer's float32 bytes, from the reference's record.
  constexpr std::uint32_t kLayer = 655605153;
  constexpr std::uint32_t kRoundedLayer = 3561877815;
  const std::vector<std::pair<std::string, std::vector<std::uint32_t>>> files =
      {{"good", {kLayer, 2971856860, 3518246698}},
       {"bigendian_layer", {kLayer}},
       {"compressed", {kLayer}},
       {"extra_layer", {kLayer}},
       {"f16_layer", {kRoundedLayer}},
       {"f64_layer", {kLayer}},
       {"fortran_layer", {kLayer}},
       {"minimal_meta", {kLayer}},
       {"string_version", {kLayer}}};
  for (const auto& [name, layers] : files) {
    SCOPED_TRACE(name);
    const auto bank = load_filters(artifacts_ / (name + ".npz"));
    ASSERT_EQ(bank.layers(), layers.size());
    for (std::size_t l = 0; l < layers.size(); ++l) {
      EXPECT_EQ(crc32(bytes_of_all(bank.layer(l).values)), layers[l]);
    }
  }
}

TEST_F(ReferenceFileTest, ReadsItsMetadata) {
  FilterMetadata expected;
  expected.model_id = "org/m\u00f6del-7B \"q\"";
  expected.n_samples = 3000;
  expected.dataset = "synthetic; seed";
  EXPECT_EQ(load_filters(artifacts_ / "good.npz").metadata(), expected);
}

TEST_F(ReferenceFileTest, RefusesEveryBrokenFile) {
  for (const char* name :
       {"bad_json",
        "empty",
        "missing_layer",
        "missing_meta",
        "no_n_layers",
        "no_version",
        "not_a_zip",
        "one_dim_layer",
        "truncated",
        "wrong_version",
        "zero_layers"}) {
    SCOPED_TRACE(name);
    refusal_of(artifacts_ / (std::string(name) + ".npz"));
  }
}

}  // namespace
}  // namespace qfilters
