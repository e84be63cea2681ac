#pragma once

#include <cstddef>
#include <cstdint>

namespace qfilters {

/// Element types the library reads. Rows are stored in one of the two
/// 16-bit types.
enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16 };

[[nodiscard]] constexpr std::size_t size_of(DType dtype) noexcept {
  return dtype == DType::kFloat32 ? 4 : 2;
}

[[nodiscard]] constexpr const char* to_string(DType dtype) noexcept {
  if (dtype == DType::kFloat32) return "float32";
  return dtype == DType::kFloat16 ? "float16" : "bfloat16";
}

/// A borrowed tensor [batch, heads, tokens, dim]. The last axis is dense;
/// strides count elements, not bytes. The view never owns its data.
struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::size_t batch = 0;
  std::size_t heads = 0;
  std::size_t tokens = 0;
  std::size_t dim = 0;
  std::ptrdiff_t batch_stride = 0;
  std::ptrdiff_t head_stride = 0;
  std::ptrdiff_t token_stride = 0;

  /// A view of a dense array in the order [batch, heads, tokens, dim].
  static constexpr TensorView dense(
      const void* data,
      DType dtype,
      std::size_t batch,
      std::size_t heads,
      std::size_t tokens,
      std::size_t dim) noexcept {
    return {
        data,
        dtype,
        batch,
        heads,
        tokens,
        dim,
        static_cast<std::ptrdiff_t>(heads * tokens * dim),
        static_cast<std::ptrdiff_t>(tokens * dim),
        static_cast<std::ptrdiff_t>(dim)};
  }

  /// Address of row [batch, head, token].
  [[nodiscard]] const void* row(
      std::size_t b, std::size_t h, std::size_t t) const noexcept {
    const std::ptrdiff_t offset =
        static_cast<std::ptrdiff_t>(b) * batch_stride +
        static_cast<std::ptrdiff_t>(h) * head_stride +
        static_cast<std::ptrdiff_t>(t) * token_stride;
    return static_cast<const std::byte*>(data) +
           offset * static_cast<std::ptrdiff_t>(size_of(dtype));
  }
};

/// Where attention writes: float32 [batch, heads, tokens, dim], last axis
/// dense, strides in elements.
struct OutputView {
  float* data = nullptr;
  std::size_t batch = 0;
  std::size_t heads = 0;
  std::size_t tokens = 0;
  std::size_t dim = 0;
  std::ptrdiff_t batch_stride = 0;
  std::ptrdiff_t head_stride = 0;
  std::ptrdiff_t token_stride = 0;

  static constexpr OutputView dense(
      float* data,
      std::size_t batch,
      std::size_t heads,
      std::size_t tokens,
      std::size_t dim) noexcept {
    return {
        data,
        batch,
        heads,
        tokens,
        dim,
        static_cast<std::ptrdiff_t>(heads * tokens * dim),
        static_cast<std::ptrdiff_t>(tokens * dim),
        static_cast<std::ptrdiff_t>(dim)};
  }

  [[nodiscard]] float* row(
      std::size_t b, std::size_t h, std::size_t t) const noexcept {
    return data + static_cast<std::ptrdiff_t>(b) * batch_stride +
           static_cast<std::ptrdiff_t>(h) * head_stride +
           static_cast<std::ptrdiff_t>(t) * token_stride;
  }
};

}  // namespace qfilters
