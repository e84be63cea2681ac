#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace qfilters::golden {

/// A folder that is no golden set: missing, damaged or of another format.
class BadFolder : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One member of an .npz file. Every number it can hold fits a double.
struct Array {
  std::vector<std::size_t> shape;
  std::vector<double> values;  ///< C order

  /// Elements begin .. begin + count - 1 as another type. Throws BadFolder
  /// where the array is shorter.
  template <typename T>
  [[nodiscard]] std::vector<T> slice(
      std::size_t begin, std::size_t count) const {
    if (begin > values.size() || count > values.size() - begin) {
      throw BadFolder("an array is shorter than the manifest says");
    }
    std::vector<T> out;
    out.reserve(count);
    for (std::size_t i = begin; i < begin + count; ++i) {
      out.push_back(static_cast<T>(values[i]));
    }
    return out;
  }

  template <typename T>
  [[nodiscard]] std::vector<T> all() const {
    return slice<T>(0, values.size());
  }
};

/// All members of an .npz file, stored or deflated, of any integer type up to
/// 32 bits or float type, in C order. Throws BadFolder.
class NpzArrays {
 public:
  explicit NpzArrays(const std::filesystem::path& path);

  [[nodiscard]] bool has(const std::string& name) const {
    return arrays_.contains(name);
  }

  /// Throws BadFolder when there is no such member.
  [[nodiscard]] const Array& operator[](const std::string& name) const;

 private:
  std::string path_;
  std::map<std::string, Array> arrays_;
};

/// float16 bits as a number.
[[nodiscard]] double from_half(unsigned bits);

}  // namespace qfilters::golden
