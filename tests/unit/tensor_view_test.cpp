#include "qfilters/tensor_view.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace qfilters {
namespace {

TEST(DTypeTest, KnowsItsSize) {
  EXPECT_EQ(size_of(DType::kFloat32), 4U);
  EXPECT_EQ(size_of(DType::kFloat16), 2U);
  EXPECT_EQ(size_of(DType::kBFloat16), 2U);
}

TEST(DTypeTest, HasAName) {
  EXPECT_EQ(std::string(to_string(DType::kFloat32)), "float32");
  EXPECT_EQ(std::string(to_string(DType::kFloat16)), "float16");
  EXPECT_EQ(std::string(to_string(DType::kBFloat16)), "bfloat16");
}

TEST(TensorViewTest, IsEmptyByDefault) {
  const TensorView view;
  EXPECT_EQ(view.data, nullptr);
  EXPECT_EQ(view.batch * view.heads * view.tokens * view.dim, 0U);
}

TEST(TensorViewTest, WalksADenseArrayInOrder) {
  const std::vector<float> data(120);
  const auto view = TensorView::dense(data.data(), DType::kFloat32, 2, 3, 4, 5);
  const float* next = data.data();
  for (std::size_t b = 0; b < 2; ++b) {
    for (std::size_t h = 0; h < 3; ++h) {
      for (std::size_t t = 0; t < 4; ++t, next += 5) {
        EXPECT_EQ(view.row(b, h, t), next);
      }
    }
  }
}

TEST(TensorViewTest, CountsStridesInElementsOfAnyType) {
  const std::array<std::uint16_t, 64> data = {};
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const TensorView view{data.data(), dtype, 2, 2, 2, 3, 32, 4, 12};
    EXPECT_EQ(view.row(1, 1, 1), data.data() + 32 + 4 + 12);
  }
}

TEST(TensorViewTest, AllowsNegativeStrides) {
  const std::array<float, 8> data = {};
  const TensorView view{data.data() + 6, DType::kFloat32, 1, 1, 4, 2, 8, 8, -2};
  EXPECT_EQ(view.row(0, 0, 3), data.data());
}

TEST(OutputViewTest, WalksADenseArrayInOrder) {
  std::vector<float> data(120);
  const auto view = OutputView::dense(data.data(), 2, 3, 4, 5);
  EXPECT_EQ(view.row(0, 0, 0), data.data());
  EXPECT_EQ(view.row(1, 2, 3), data.data() + data.size() - 5);
}

TEST(OutputViewTest, FollowsItsStrides) {
  std::array<float, 64> data = {};
  const OutputView view{data.data(), 2, 2, 2, 3, 32, 4, 12};
  EXPECT_EQ(view.row(1, 1, 1), data.data() + 32 + 4 + 12);
}

}  // namespace
}  // namespace qfilters
