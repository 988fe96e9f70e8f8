#include "deep_ep/tensor.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>

namespace deep_ep {
namespace {

using Pair = std::array<std::int64_t, 2>;

TEST(TensorTest, EveryDTypeHasTheNameThatTorchGivesIt) {
  EXPECT_STREQ(name_of(DType::kUInt8), "uint8");
  EXPECT_STREQ(name_of(DType::kInt32), "int32");
  EXPECT_STREQ(name_of(DType::kInt64), "int64");
  EXPECT_STREQ(name_of(DType::kFloat32), "float32");
  EXPECT_STREQ(name_of(DType::kBFloat16), "bfloat16");
  EXPECT_STREQ(name_of(DType::kFloat8E4M3), "float8_e4m3fn");
  EXPECT_STREQ(name_of(static_cast<DType>(99)), "unknown dtype");
}

TEST(TensorTest, AMatrixIsContiguousByRows) {
  int data = 0;
  const TensorView view = TensorView::matrix(&data, DType::kBFloat16, 3, 5);
  EXPECT_EQ(view.data, &data);
  EXPECT_EQ(view.num_dims, 2);
  EXPECT_EQ(view.shape, (Pair{3, 5}));
  EXPECT_EQ(view.strides, (Pair{5, 1}));
  EXPECT_EQ(view.num_elements(), 15);
  EXPECT_EQ(view.num_bytes(), 30);
  EXPECT_TRUE(view.is_contiguous());
}

TEST(TensorTest, AVectorHasOneColumn) {
  const TensorView view = TensorView::vector(nullptr, DType::kInt64, 4);
  EXPECT_EQ(view.num_dims, 1);
  EXPECT_EQ(view.shape, (Pair{4, 1}));
  EXPECT_EQ(view.num_bytes(), 32);
  EXPECT_TRUE(view.is_contiguous());
}

TEST(TensorTest, OtherStridesAreNotContiguousUnlessTheyAreNeverUsed) {
  TensorView view = TensorView::matrix(nullptr, DType::kFloat32, 3, 5);
  view.strides = {1, 3};
  EXPECT_FALSE(view.is_contiguous());
  view.shape = {1, 1};
  EXPECT_TRUE(view.is_contiguous());
  view.shape = {0, 5};
  EXPECT_TRUE(view.is_contiguous());
  view = TensorView::matrix(nullptr, DType::kFloat32, 3, 5);
  view.strides = {8, 1};
  EXPECT_FALSE(view.is_contiguous());
}

TEST(TensorTest, ADefaultTensorIsNotGivenButAnEmptyOneIs) {
  EXPECT_FALSE(Tensor().is_given());
  EXPECT_TRUE(TensorView::matrix(nullptr, DType::kFloat32, 0, 5).is_given());
}

}  // namespace
}  // namespace deep_ep
