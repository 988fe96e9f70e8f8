#pragma once
// Who lends blocks of a window to tensors.
#include <cstdint>
#include <memory>

#include "deep_ep/tensor.hpp"

namespace deep_ep {

class Lender {
 public:
  virtual ~Lender() = default;

  /// A block of at least `num_bytes`, contents unspecified, which comes back with its last
  /// reference; null for no bytes. Throws kSystem when there is no room.
  virtual std::shared_ptr<void> lend(std::int64_t num_bytes) = 0;

  /// Where the blocks lie: a GPU's ordinal, or kHostMemory.
  virtual int cuda_device() const noexcept = 0;

  Tensor lend_matrix(std::int64_t num_rows, std::int64_t num_columns, DType dtype) {
    return lend_as(TensorView::matrix(nullptr, dtype, num_rows, num_columns));
  }
  Tensor lend_vector(std::int64_t num_elements, DType dtype) {
    return lend_as(TensorView::vector(nullptr, dtype, num_elements));
  }

 private:
  Tensor lend_as(TensorView shape) {
    std::shared_ptr<void> block = lend(shape.num_bytes());
    shape.data = block.get();
    shape.cuda_device = cuda_device();
    return {shape, std::move(block)};
  }
};

}  // namespace deep_ep
