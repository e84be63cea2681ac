#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace qfilters::io {

/// A number type as numpy names it: "<f4", ">i8", "|b1".
struct NpyType {
  char kind;         ///< f, i, u or b
  std::size_t size;  ///< bytes
  bool big_endian;
};

/// float16 to 64, integers of 8 to 64 bits with and without sign, and bool;
/// nothing for any other type.
[[nodiscard]] std::optional<NpyType> npy_number(std::string_view descr);

/// Numbers as float32. `bytes` holds values.size() of them.
void decode_npy(
    NpyType type, std::span<const char> bytes, std::span<float> values);

struct NpyHeader {
  std::string descr;
  bool fortran_order = false;
  std::vector<std::uint64_t> shape;
};

/// Reads the Python dict of a header. Throws Error kFile.
[[nodiscard]] NpyHeader parse_npy_header(std::string_view text);

/// All that stands before the data of an array in C order, version 1.
[[nodiscard]] std::string npy_header(
    const std::string& descr, const std::string& shape);

}  // namespace qfilters::io
