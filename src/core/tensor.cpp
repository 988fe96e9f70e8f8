#include "deep_ep/tensor.hpp"

namespace deep_ep {

const char* name_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kUInt8:
      return "uint8";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
  }
  return "unknown dtype";
}

TensorView TensorView::matrix(void* data, DType dtype, std::int64_t num_rows,
                              std::int64_t num_columns) {
  return {.data = data,
          .dtype = dtype,
          .num_dims = 2,
          .shape = {num_rows, num_columns},
          .strides = {num_columns, 1}};
}

TensorView TensorView::vector(void* data, DType dtype, std::int64_t num_elements) {
  return {
      .data = data, .dtype = dtype, .num_dims = 1, .shape = {num_elements, 1}, .strides = {1, 1}};
}

}  // namespace deep_ep
