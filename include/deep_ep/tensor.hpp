#pragma once
// Tensors as the library sees them: an address with dtype, shape and strides, and who keeps it
// alive.
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace deep_ep {

/// Element types that cross the API. Sizes in bytes: 1, 4, 8, 4, 2, 1.
enum class DType { kUInt8, kInt32, kInt64, kFloat32, kBFloat16, kFloat8E4M3 };

/// Bytes of one element.
constexpr std::int64_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kFloat8E4M3:
      return 1;
    case DType::kBFloat16:
      return 2;
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
      return 8;
  }
  return 0;
}

/// The name a message shows, e.g. "bfloat16".
const char* name_of(DType dtype) noexcept;

/// In place of a GPU's ordinal: memory of the host.
inline constexpr int kHostMemory = -1;

/// A borrowed tensor of one or two dimensions; `shape[1]` of a one-dimensional tensor is 1.
/// `data` may be null when the tensor has no elements.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kUInt8;
  int num_dims = 0;  ///< 0: no tensor was given
  std::array<std::int64_t, 2> shape = {0, 1};
  std::array<std::int64_t, 2> strides = {1, 1};  ///< in elements
  int cuda_device = kHostMemory;                 ///< ordinal of the GPU that holds it

  /// A contiguous tensor `[num_rows, num_columns]`.
  static TensorView matrix(void* data, DType dtype, std::int64_t num_rows,
                           std::int64_t num_columns);
  /// A contiguous tensor `[num_elements]`.
  static TensorView vector(void* data, DType dtype, std::int64_t num_elements);

  bool is_given() const noexcept { return num_dims != 0; }
  std::int64_t num_elements() const noexcept { return shape[0] * shape[1]; }
  std::int64_t num_bytes() const noexcept { return num_elements() * size_of(dtype); }
  bool is_contiguous() const noexcept {
    return num_elements() == 0 ||
           ((shape[1] == 1 || strides[1] == 1) && (shape[0] == 1 || strides[0] == shape[1]));
  }
  template <typename T>
  T* as() const noexcept {
    return static_cast<T*>(data);
  }
};

/// A tensor together with what keeps its memory alive. Copies share the memory.
struct Tensor {
  TensorView view;
  std::shared_ptr<void> storage;  ///< null when no tensor was asked for

  bool is_given() const noexcept { return view.is_given(); }
  template <typename T>
  T* as() const noexcept {
    return view.as<T>();
  }
};

}  // namespace deep_ep
