#include "io/npy.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "unit/filter_file_fixture.h"

namespace qfilters::io {
namespace {

// Decodes what was written in this machine's order, in both byte orders.
template <typename T>
void expect_decoded(const std::string& type, const std::vector<T>& from) {
  std::vector<float> expected(from.size());
  std::transform(from.begin(), from.end(), expected.begin(), [](T value) {
    return static_cast<float>(value);
  });
  for (const char order : {'<', '>'}) {
    SCOPED_TRACE(order + type);
    std::string bytes = bytes_of_all(from);
    if (order == '>') {
      for (auto at = bytes.begin(); at != bytes.end(); at += sizeof(T)) {
        std::reverse(at, at + sizeof(T));
      }
    }
    const auto number = npy_number(order + type);
    ASSERT_TRUE(number.has_value());
    std::vector<float> values(from.size());
    decode_npy(*number, bytes, values);
    EXPECT_EQ(values, expected);
  }
}

template <typename T>
void expect_decoded(const std::string& type) {
  using Limits = std::numeric_limits<T>;
  expect_decoded<T>(
      type,
      {T{0},
       T{1},
       T{100},
       Limits::max(),
       Limits::lowest(),
       static_cast<T>(Limits::max() / 3),
       static_cast<T>(Limits::lowest() / 3)});
}

TEST(NpyTest, DecodesEveryIntegerAsTheNearestFloat) {
  expect_decoded<std::int8_t>("i1");
  expect_decoded<std::int16_t>("i2");
  expect_decoded<std::int32_t>("i4");
  expect_decoded<std::int64_t>("i8");
  expect_decoded<std::uint8_t>("u1");
  expect_decoded<std::uint16_t>("u2");
  expect_decoded<std::uint32_t>("u4");
  expect_decoded<std::uint64_t>("u8");
}

TEST(NpyTest, DecodesFloatsAndDoubles) {
  expect_decoded<float>("f4");
  expect_decoded<double>("f8", {0.0, -0.5, 1.0 / 3.0, 1e-50, 0x1p127});
}

TEST(NpyTest, DecodesBytesWithoutAnOrder) {
  std::vector<float> values(3);
  decode_npy(npy_number("|i1").value(), std::string("\xFF\0\x7F", 3), values);
  EXPECT_EQ(values, (std::vector<float>{-1, 0, 127}));
  decode_npy(npy_number("|b1").value(), std::string("\1\0\2", 3), values);
  EXPECT_EQ(values, (std::vector<float>{1, 0, 1}));
}

TEST(NpyTest, KnowsNoOtherType) {
  for (const char* type :
       {"",    "f",    "f4",   "<f",  "<f1", "<f3", "<f16", "<i3",  "<i16",
        "<c8", "<c16", "<b4",  "<U4", "|S1", "|O",  "|V8",  "<M8",  "|f4",
        "|i2", "=f4",  "<f4 ", " f4", "<f0", "<i9", "<i-",  "<fX2", "b1"}) {
    EXPECT_FALSE(npy_number(type).has_value()) << type;
  }
}

}  // namespace
}  // namespace qfilters::io
