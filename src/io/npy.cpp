#include "io/npy.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "io/input_file.h"

namespace qfilters::io {
namespace {

using Json = nlohmann::json;

// A Python dict such as {'descr': '<f4', 'shape': (2, 64), } differs from JSON
// only in quotes, brackets, capitals and trailing commas.
Json parse_python_dict(std::string_view text) {
  std::string json;
  for (const char c : text) {
    if (c == ' ' || c == '\n') continue;
    const bool closes = c == ')' || c == '}';
    if (closes && !json.empty() && json.back() == ',') json.pop_back();
    constexpr std::string_view kPython = "'()FT";
    constexpr std::string_view kJson = "\"[]ft";
    const std::size_t found = kPython.find(c);
    json += found == std::string_view::npos ? c : kJson[found];
  }
  return Json::parse(json, nullptr, /*allow_exceptions=*/false);
}

double half_to_double(std::uint64_t bits) {
  const auto exponent = static_cast<int>((bits >> 10) & 0x1F);
  const auto fraction = static_cast<double>(bits & 0x3FF);
  double size = std::ldexp(fraction, -24);  // of a subnormal
  if (exponent > 0) size = std::ldexp(fraction + 1024.0, exponent - 25);
  if (exponent == 31) size = std::numeric_limits<double>::infinity();  // or NaN
  return (bits & 0x8000) != 0 ? -size : size;
}

float decode_float(std::uint64_t bits, std::size_t size) {
  if (size == 4) return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
  if (size == 2) return static_cast<float>(half_to_double(bits));
  return static_cast<float>(std::bit_cast<double>(bits));
}

float decode_one(NpyType type, const char* bytes) {
  std::array<char, 8> little = {};
  std::copy_n(bytes, type.size, little.begin());
  if (type.big_endian) {
    std::reverse(little.begin(), little.begin() + type.size);
  }
  const auto bits = std::bit_cast<std::uint64_t>(little);
  if (type.kind == 'f') return decode_float(bits, type.size);
  if (type.kind == 'b') return bits != 0 ? 1.0F : 0.0F;
  if (type.kind == 'u') return static_cast<float>(bits);
  const std::size_t unused = 64 - 8 * type.size;  // bits above the sign
  return static_cast<float>(
      static_cast<std::int64_t>(bits << unused) >> unused);
}

}  // namespace

std::optional<NpyType> npy_number(std::string_view descr) {
  if (descr.size() != 3) return std::nullopt;
  const char order = descr[0];
  const char kind = descr[1];
  const char digit = descr[2];
  const auto sizes = kind == 'f'                  ? std::string_view("248")
                     : kind == 'i' || kind == 'u' ? std::string_view("1248")
                     : kind == 'b'                ? std::string_view("1")
                                                  : std::string_view();
  const bool ordered = order == '<' || order == '>';
  if (sizes.find(digit) == std::string_view::npos ||
      !(ordered || (order == '|' && digit == '1'))) {
    return std::nullopt;
  }
  return NpyType{kind, static_cast<std::size_t>(digit - '0'), order == '>'};
}

void decode_npy(
    NpyType type, std::span<const char> bytes, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = decode_one(type, &bytes[i * type.size]);
  }
}

NpyHeader parse_npy_header(std::string_view text) {
  const Json dict = parse_python_dict(text);
  NpyHeader header;
  bool valid = dict.is_object() && dict.size() == 3 &&
               dict.value("descr", Json()).is_string() &&
               dict.value("fortran_order", Json()).is_boolean() &&
               dict.value("shape", Json()).is_array();
  if (valid) {
    header.descr = dict["descr"];
    header.fortran_order = dict["fortran_order"];
    for (const Json& size : dict["shape"]) {
      valid = valid && size.is_number_unsigned();
      if (valid) header.shape.push_back(size);
    }
  }
  if (!valid) fail("a member's .npy header is damaged");
  return header;
}

std::string npy_header(const std::string& descr, const std::string& shape) {
  std::string dict = "{'descr': '" + descr +
                     "', 'fortran_order': False, 'shape': " + shape + ", }";
  constexpr std::size_t kDictBytes = 118;  // numpy fills 128 bytes in all
  dict.resize(kDictBytes - 1, ' ');
  return std::string("\x93NUMPY\x01\0v\0", 10) + dict + '\n';
}

}  // namespace qfilters::io
