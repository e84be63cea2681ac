#include "qfilters/filter_file.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"

#include "unit/filter_file_fixture.h"

namespace qfilters {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

class EachFormatTest : public FilterFileTest,
                       public ::testing::WithParamInterface<const char*> {
 protected:
  [[nodiscard]] fs::path file() const {
    return folder_ / (std::string("f.") + GetParam());
  }
};

TEST_P(EachFormatTest, ReadsWhatItWroteBitForBit) {
  save_filters(some_filters(), file());
  const FilterBank bank = load_filters(file());
  EXPECT_EQ(bank.metadata(), some_filters().metadata());
  ASSERT_EQ(bank.layers(), 2U);
  for (std::size_t l = 0; l < 2; ++l) {
    EXPECT_EQ(bits_of(bank.layer(l)), bits_of(some_filters().layer(l)));
  }
  EXPECT_EQ(bank.fingerprint(), some_filters().fingerprint());
}

TEST_P(EachFormatTest, RefusesFiltersOfAnotherModelThanExpected) {
  save_filters(some_filters(), file());
  const FilterMetadata own = some_filters().metadata();
  EXPECT_EQ(
      load_filters(
          file(),
          {.model_id = own.model_id,
           .model_fingerprint = own.model_fingerprint}),
      some_filters());
  for (const FilterExpectation& expected :
       {FilterExpectation{.model_id = "other"},
        FilterExpectation{.model_fingerprint = "other"},
        FilterExpectation{
            .model_id = own.model_id, .model_fingerprint = "other"},
        FilterExpectation{
            .model_id = "other", .model_fingerprint = own.model_fingerprint}}) {
    EXPECT_THAT(
        message_of(
            [&] { static_cast<void>(load_filters(file(), expected)); },
            ErrorKind::kMismatch),
        AllOf(
            HasSubstr(file().string()),
            HasSubstr(own.model_id),
            HasSubstr(own.model_fingerprint),
            HasSubstr("other")));
  }
}

TEST_P(EachFormatTest, CannotCompareAFingerprintThatIsNotRecorded) {
  FilterMetadata metadata;
  metadata.model_id = "m";
  const FilterBank bank({{1, 1, {1}}}, metadata);
  save_filters(bank, file());
  EXPECT_EQ(load_filters(file(), {.model_fingerprint = "any"}), bank);
}

TEST_P(EachFormatTest, KeepsManyShapesOfLayersBitForBit) {
  for (std::size_t heads = 1; heads <= 5; ++heads) {
    for (const std::size_t dim : {1U, 3U, 8U, 64U, 129U}) {
      SCOPED_TRACE(std::to_string(heads) + " x " + std::to_string(dim));
      std::vector<LayerFilters> layers(
          heads, {heads, dim, std::vector<float>(heads * dim)});
      float value = -1;
      for (LayerFilters& layer : layers) {
        for (float& each : layer.values) {
          each = value *= -1.03125F;
          if (std::abs(value) > 1e9F) value = 1e-9F;
        }
      }
      const FilterBank bank(layers, some_metadata());
      save_filters(bank, file());
      EXPECT_EQ(load_filters(file()), bank);
    }
  }
}

TEST_P(EachFormatTest, WritesTheSameBytesAnyTimeAnywhere) {
  save_filters(some_filters(), file());
  const std::string first = read(file());
  ::setenv("TZ", "Pacific/Kiritimati", 1);
  ::tzset();
  save_filters(some_filters(), file());
  ::unsetenv("TZ");
  ::tzset();
  EXPECT_EQ(read(file()), first);
}

TEST_P(EachFormatTest, ReadsAnExtensionInCapitals) {
  save_filters(some_filters(), file());
  std::string capitals = std::string("f.") + GetParam();
  std::transform(
      capitals.begin(), capitals.end(), capitals.begin(), [](char c) {
        return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
      });
  fs::rename(file(), folder_ / capitals);
  EXPECT_EQ(load_filters(folder_ / capitals), some_filters());
}

TEST_P(EachFormatTest, WritesNamesThatAreNoUnicode) {
  FilterMetadata metadata;
  metadata.dataset = "caf\xE9.txt";
  save_filters(FilterBank({{1, 1, {1}}}, metadata), file());
  EXPECT_EQ(load_filters(file()).metadata().dataset, "caf\uFFFD.txt");
}

TEST_P(EachFormatTest, RefusesAFileCutAtAnyLength) {
  save_filters(some_filters(), file());
  const std::string content = read(file());
  for (std::size_t length = 0; length < content.size(); ++length) {
    SCOPED_TRACE(length);
    fs::resize_file(file(), length);
    refusal_of(file());
    std::ofstream(file(), std::ios::binary) << content;
  }
}

TEST_P(EachFormatTest, RefusesOrReadsAFileWithAnyByteChanged) {
  save_filters(some_filters(), file());
  const std::string content = read(file());
  for (std::size_t i = 0; i < content.size(); ++i) {
    for (const char mask : {'\x01', '\xFF'}) {
      std::string changed = content;
      changed[i] = static_cast<char>(changed[i] ^ mask);
      const fs::path path = write(file().filename().string(), changed);
      try {
        EXPECT_EQ(load_filters(path).layers(), 2U);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kFile);
      }
    }
  }
}

TEST_P(EachFormatTest, RefusesWhatIsNotOfTheFormat) {
  for (const std::string content : {"", "x", "PK\5\6", "not a filter file"}) {
    SCOPED_TRACE(content);
    refusal_of(write(file().filename().string(), content));
  }
  refusal_of(write(file().filename().string(), std::string(100'000, '\0')));
  refusal_of(write(file().filename().string(), std::string(100'000, '\xFF')));
}

TEST_P(EachFormatTest, RefusesAFolder) {
  fs::create_directory(file());
  EXPECT_THAT(refusal_of(file()), HasSubstr("not a regular file"));
}

TEST_P(EachFormatTest, NamesTheCommandThatMakesAMissingFile) {
  EXPECT_THAT(refusal_of(file()), HasSubstr("qfilters calibrate"));
}

TEST_P(EachFormatTest, NamesThePathThatCannotBeWritten) {
  const fs::path path = folder_ / "missing" / file().filename();
  EXPECT_THAT(
      message_of([&] { save_filters(some_filters(), path); }),
      HasSubstr(path.string()));
}

TEST_P(EachFormatTest, RefusesToWriteMetadataThatItWouldNotRead) {
  FilterMetadata metadata;
  metadata.dataset = std::string(65536, 'x');
  save_filters(some_filters(), file());
  EXPECT_THAT(
      message_of([&] {
        save_filters(FilterBank({{1, 1, {1}}}, metadata), file());
      }),
      HasSubstr("too long"));
  EXPECT_EQ(load_filters(file()), some_filters());
}

INSTANTIATE_TEST_SUITE_P(
    EachFormat,
    EachFormatTest,
    ::testing::Values("npz", "safetensors", "gguf"),
    [](const auto& param) { return std::string(param.param); });

// Formats that say in the file which sign they have.
class EachSignedFormatTest : public EachFormatTest {};

TEST_P(EachSignedFormatTest, WritesEitherSignAndReadsBoth) {
  const FilterBank bank({{1, 2, {1.5F, -2.5F}}}, some_metadata());
  for (const auto& [sign, name, first] :
       std::vector<std::tuple<FilterSign, std::string, float>>{
           {FilterSign::kPositive, "positive", 1.5F},
           {FilterSign::kNegated, "negated", -1.5F}}) {
    SCOPED_TRACE(name);
    save_filters(bank, file(), sign);
    const std::string content = read(file());
    EXPECT_THAT(content, HasSubstr(name));
    EXPECT_THAT(content, HasSubstr(bytes_of(first) + bytes_of(first / -0.6F)));
    EXPECT_EQ(load_filters(file()), bank);
  }
}

INSTANTIATE_TEST_SUITE_P(
    EachSignedFormat,
    EachSignedFormatTest,
    ::testing::Values("safetensors", "gguf"),
    [](const auto& param) { return std::string(param.param); });

TEST_F(FilterFileTest, AcceptsEveryExtensionThatItCanRead) {
  for (const char* name : {"f.npz", "f.safetensors", "f.gguf", "F.NPZ"}) {
    EXPECT_NO_THROW(check_filter_extension(name)) << name;
  }
}

TEST_F(FilterFileTest, RefusesANegatedNpz) {
  const fs::path path = folder_ / "f.npz";
  save_filters(some_filters(), path, FilterSign::kPositive);
  EXPECT_THAT(
      message_of(
          [&] { save_filters(some_filters(), path, FilterSign::kNegated); },
          ErrorKind::kInvalidArgument),
      AllOf(HasSubstr(path.string()), HasSubstr("always positive")));
  EXPECT_EQ(load_filters(path), some_filters());
}

TEST_F(FilterFileTest, RefusesAnotherExtension) {
  for (const char* name : {"f.bin", "f", "f.npz.gz", ".npz"}) {
    SCOPED_TRACE(name);
    EXPECT_THAT(
        refusal_of(write(name, "content")),
        AllOf(
            HasSubstr(".npz"), HasSubstr(".safetensors"), HasSubstr(".gguf")));
    EXPECT_THAT(
        message_of([&] { save_filters(some_filters(), folder_ / name); }),
        HasSubstr(name));
    EXPECT_EQ(read(folder_ / name), "content");
    EXPECT_THAT(
        message_of([&] { check_filter_extension(folder_ / name); }),
        HasSubstr(name));
  }
}

}  // namespace
}  // namespace qfilters
