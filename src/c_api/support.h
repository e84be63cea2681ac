#pragma once

// What the functions of the C API share: handles, errors, buffers, structs.

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "qfilters/attention.h"
#include "qfilters/c_api.h"
#include "qfilters/error.h"
#include "qfilters/filter_bank.h"
#include "qfilters/kv_cache.h"
#include "qfilters/tensor_view.h"

struct qf_filters {
  std::shared_ptr<const qfilters::FilterBank> bank;
};

namespace qfilters::c_api {

/// Turns the exception in flight into a status, and its message into the
/// thread's last error.
qf_status report(const char* function) noexcept;

/// Runs the body of an API function: nothing is thrown past it.
template <typename Body>
qf_status guard(const char* function, Body&& body) noexcept {
  try {
    body();
    return QF_OK;
  } catch (...) {
    return report(function);
  }
}

[[noreturn]] void reject(const std::string& what);

/// What `pointer` points to; throws for NULL.
template <typename T>
T& deref(T* pointer, const char* name) {
  if (pointer == nullptr) reject(std::string(name) + " is NULL");
  return *pointer;
}

/// A text that may be NULL.
inline std::string text_or_empty(const char* text) {
  return text == nullptr ? std::string() : std::string(text);
}

/// What can be said of a buffer before its size is known.
template <typename T>
void check_buffer(const T* out, std::size_t capacity, const std::size_t* size) {
  deref(size, "size");
  if (capacity > 0) deref(out, "out");
}

/// The rule for buffers: tells the size, checks the room; whether the caller
/// wants `count` elements written.
template <typename T>
bool wants(
    std::size_t count, const T* out, std::size_t capacity, std::size_t* size) {
  deref(size, "size") = count;
  if (capacity == 0) return false;
  if (capacity < count) {
    reject(
        "capacity " + std::to_string(capacity) + " is below the size " +
        std::to_string(count));
  }
  deref(out, "out");
  return true;
}

template <typename T>
void copy_out(
    std::span<const T> from, T* out, std::size_t capacity, std::size_t* size) {
  if (wants(from.size(), out, capacity, size)) std::ranges::copy(from, out);
}

/// The ending NUL included.
inline void copy_text(
    const std::string& text,
    char* out,
    std::size_t capacity,
    std::size_t* size) {
  copy_out(std::span(text.c_str(), text.size() + 1), out, capacity, size);
}

inline void check_group(const RowShape& shape, std::size_t group) {
  if (group < shape.groups()) return;
  reject(
      "group " + std::to_string(group) + " of " +
      std::to_string(shape.groups()));
}

/// Keys of a group of a RowsView or a KVStore, row-major.
template <typename Rows>
void copy_keys(
    const Rows& rows,
    std::size_t group,
    std::uint16_t* out,
    std::size_t capacity,
    std::size_t* size) {
  check_group(rows.shape(), group);
  const std::size_t dim = rows.shape().key_dim;
  const std::size_t count = rows.rows(group);
  if (!wants(count * dim, out, capacity, size)) return;
  for (std::size_t r = 0; r < count; ++r) {
    rows.read_key(group, r, out + r * dim);
  }
}

template <typename Rows>
void copy_values(
    const Rows& rows,
    std::size_t group,
    std::uint16_t* out,
    std::size_t capacity,
    std::size_t* size) {
  check_group(rows.shape(), group);
  const std::size_t dim = rows.shape().value_dim;
  const std::size_t count = rows.rows(group);
  if (!wants(count * dim, out, capacity, size)) return;
  for (std::size_t r = 0; r < count; ++r) {
    rows.read_value(group, r, out + r * dim);
  }
}

template <typename T>
void check_struct_size(std::size_t size) {
  if (size == sizeof(T)) return;
  reject(
      "struct_size " + std::to_string(size) + " is not this library's " +
      std::to_string(sizeof(T)));
}

/// Writes a struct whose size the caller has said.
template <typename T>
void write_struct(T* out, const char* name, std::size_t size, const T& value) {
  deref(out, name);
  check_struct_size<T>(size);
  *out = value;
}

/// A struct that the caller has filled; the defaults for NULL.
template <typename T>
T read_struct(const T* given, const T& defaults) {
  if (given == nullptr) return defaults;
  check_struct_size<T>(given->struct_size);
  return *given;
}

/// Throws for a number that is no DType.
DType dtype_of(std::int32_t dtype);
TensorView view_of(const qf_tensor* tensor, const char* name);

/// attend() with the structs of the C API.
void attend_to(
    const RowsView& rows,
    const qf_tensor* queries,
    const qf_attention* options,
    const qf_output* out);

/// A saved state, of any size.
inline std::span<const std::byte> bytes_of(
    const void* saved, std::size_t size) {
  if (size > 0) deref(static_cast<const std::byte*>(saved), "saved");
  return {static_cast<const std::byte*>(saved), size};
}

}  // namespace qfilters::c_api
