#include "conformance/npz_arrays.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <regex>
#include <utility>

#include <zip.h>

namespace qfilters::golden {

namespace {

template <auto Function>
struct Release {
  void operator()(auto* handle) const noexcept { Function(handle); }
};

using Zip = std::unique_ptr<zip_t, Release<zip_discard>>;
using ZipFile = std::unique_ptr<zip_file_t, Release<zip_fclose>>;

std::string read_member(zip_t* archive, zip_uint64_t index) {
  zip_stat_t stat = {};
  const ZipFile file(zip_fopen_index(archive, index, 0));
  if (file == nullptr || zip_stat_index(archive, index, 0, &stat) != 0) {
    throw BadFolder(zip_strerror(archive));
  }
  std::string content(stat.size, '\0');
  const zip_int64_t got = zip_fread(file.get(), content.data(), content.size());
  char end = 0;
  // One byte more makes libzip compare the checksum.
  if (got != static_cast<zip_int64_t>(content.size()) ||
      zip_fread(file.get(), &end, 1) != 0) {
    throw BadFolder("a member is damaged");
  }
  return content;
}

template <typename T>
double number_at(const char* bytes) {
  T value = 0;
  std::memcpy(&value, bytes, sizeof(T));
  return static_cast<double>(value);
}

double element(const std::string& type, const char* bytes) {
  if (type == "f2") {
    std::uint16_t bits = 0;
    std::memcpy(&bits, bytes, sizeof(bits));
    return from_half(bits);
  }
  if (type == "f4") return number_at<float>(bytes);
  if (type == "f8") return number_at<double>(bytes);
  if (type == "u1" || type == "b1") return number_at<std::uint8_t>(bytes);
  if (type == "i1") return number_at<std::int8_t>(bytes);
  if (type == "u2") return number_at<std::uint16_t>(bytes);
  if (type == "i2") return number_at<std::int16_t>(bytes);
  if (type == "u4") return number_at<std::uint32_t>(bytes);
  if (type == "i4") return number_at<std::int32_t>(bytes);
  throw BadFolder("type " + type + " is not read");
}

Array parse(const std::string& npy) {
  static_assert(std::endian::native == std::endian::little);
  static const std::regex header(
      "\\{'descr': '([<>|])([a-z][0-9])', 'fortran_order': False, "
      "'shape': \\(([0-9, ]*)\\), \\}\\s*");
  constexpr std::size_t kStart = 10;
  if (npy.size() < kStart || npy.compare(0, 8, "\x93NUMPY\1\0", 8) != 0) {
    throw BadFolder("a member is not .npy of version 1");
  }
  const std::size_t length = static_cast<unsigned char>(npy[8]) +
                             256U * static_cast<unsigned char>(npy[9]);
  std::smatch match;
  const std::string text = npy.substr(kStart, length);
  if (!std::regex_match(text, match, header)) {
    throw BadFolder("a member has the .npy header " + text);
  }
  Array out;
  const std::string sizes = match[3];
  static const std::regex number("[0-9]+");
  for (std::sregex_iterator at(sizes.begin(), sizes.end(), number), end;
       at != end;
       ++at) {
    out.shape.push_back(std::stoul(at->str()));
  }
  std::size_t count = 1;
  for (const std::size_t size : out.shape) {
    count *= size;
  }
  const std::string type = match[2];
  const auto size = static_cast<std::size_t>(type[1] - '0');
  if (npy.size() != kStart + length + count * size) {
    throw BadFolder("a member does not have the size of its shape");
  }
  out.values.reserve(count);
  std::string bytes(size, '\0');
  for (std::size_t i = 0; i < count; ++i) {
    bytes.assign(npy, kStart + length + i * size, size);
    if (match[1] == ">") std::reverse(bytes.begin(), bytes.end());
    out.values.push_back(element(type, bytes.data()));
  }
  return out;
}

}  // namespace

double from_half(unsigned bits) {
  const auto exponent = static_cast<int>((bits >> 10U) & 0x1FU);
  const auto fraction = static_cast<double>(bits & 0x3FFU);
  double size = exponent == 0 ? std::ldexp(fraction, -24)
                              : std::ldexp(fraction + 1024, exponent - 25);
  if (exponent == 31) {
    size = fraction == 0 ? std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  return (bits & 0x8000U) != 0 ? -size : size;
}

NpzArrays::NpzArrays(const std::filesystem::path& path) : path_(path.string()) {
  int code = 0;
  const Zip archive(zip_open(path.c_str(), ZIP_RDONLY, &code));
  if (archive == nullptr) {
    throw BadFolder(path_ + " is missing or no .npz file");
  }
  const zip_int64_t members = zip_get_num_entries(archive.get(), 0);
  for (zip_int64_t i = 0; i < members; ++i) {
    const auto index = static_cast<zip_uint64_t>(i);
    std::string name = zip_get_name(archive.get(), index, ZIP_FL_ENC_RAW);
    try {
      Array array = parse(read_member(archive.get(), index));
      if (name.ends_with(".npy")) name.resize(name.size() - 4);
      arrays_.emplace(std::move(name), std::move(array));
    } catch (const std::exception& error) {
      throw BadFolder(path_ + ", " + name + ": " + error.what());
    }
  }
}

const Array& NpzArrays::operator[](const std::string& name) const {
  const auto found = arrays_.find(name);
  if (found == arrays_.end()) throw BadFolder(path_ + " has no " + name);
  return found->second;
}

}  // namespace qfilters::golden
