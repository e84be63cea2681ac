#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <new>

namespace qfilters {

/// The product of sizes, for an allocation. Throws std::bad_array_new_length,
/// a std::bad_alloc, when no memory holds as many elements.
inline std::size_t checked_product(std::initializer_list<std::size_t> sizes) {
  // Elements of 8 bytes: a vector throws std::length_error for more.
  constexpr std::size_t kMost = PTRDIFF_MAX / sizeof(double);
  std::size_t product = 1;
  for (const std::size_t size : sizes) {
    if (size == 0) return 0;
  }
  for (const std::size_t size : sizes) {
    if (product > kMost / size) throw std::bad_array_new_length();
    product *= size;
  }
  return product;
}

}  // namespace qfilters
