#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "deep_ep/tensor.hpp"
#include "python/bind.hpp"

namespace deep_ep::python {
namespace {

std::int64_t to_int64(nb::handle number) {
  const long long value = PyLong_AsLongLong(number.ptr());
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

/// Of more than two dimensions the first two are kept: no call takes such a tensor, and it says so.
TensorView make_view(std::uintptr_t data, DType dtype, const nb::tuple& shape,
                     const nb::tuple& strides, int cuda_device) {
  if (shape.size() != strides.size())
    throw nb::value_error("shape and strides must be equally long");
  // A scalar counts as one element, since no dimensions stand for no tensor.
  TensorView view{.data = reinterpret_cast<void*>(data),
                  .dtype = dtype,
                  .num_dims = std::max(1, static_cast<int>(shape.size())),
                  .shape = {1, 1},
                  .cuda_device = cuda_device};
  for (std::size_t i = 0; i < std::min<std::size_t>(shape.size(), 2); ++i) {
    view.shape[i] = to_int64(shape[i]);
    view.strides[i] = to_int64(strides[i]);
  }
  return view;
}

nb::tuple to_tuple(const std::array<std::int64_t, 2>& numbers, int num_dims) {
  return num_dims == 1 ? nb::make_tuple(numbers[0]) : nb::make_tuple(numbers[0], numbers[1]);
}

std::string describe(const TensorView& view) {
  const auto join = [&](const std::array<std::int64_t, 2>& numbers) {
    return std::to_string(numbers[0]) +
           (view.num_dims == 1 ? "" : ", " + std::to_string(numbers[1]));
  };
  return "TensorView(" + std::string(name_of(view.dtype)) + "[" + join(view.shape) +
         "], strides [" + join(view.strides) + "])";
}

nb::dlpack::dtype to_dlpack(DType dtype) noexcept {
  using Code = nb::dlpack::dtype_code;
  const auto make = [&](Code code) {
    return nb::dlpack::dtype{.code = static_cast<std::uint8_t>(code),
                             .bits = static_cast<std::uint8_t>(size_of(dtype) * 8),
                             .lanes = 1};
  };
  switch (dtype) {
    case DType::kUInt8:
    case DType::kFloat8E4M3:  // as bytes: DLPack has known this type only since 1.1
      return make(Code::UInt);
    case DType::kInt32:
    case DType::kInt64:
      return make(Code::Int);
    case DType::kFloat32:
      return make(Code::Float);
    case DType::kBFloat16:
      return make(Code::Bfloat);
  }
  return make(Code::UInt);
}

/// `DLManagedTensor` of DLPack before 1.0, which every consumer reads, and what it points to. It
/// holds no Python object, so that its consumer may drop it on any thread.
struct ManagedTensor {
  nb::dlpack::dltensor tensor;
  void* context = nullptr;
  void (*deleter)(ManagedTensor*) = nullptr;
  std::array<std::int64_t, 2> shape, strides;
  Owner<void> storage;
};

constexpr const char* kUnusedCapsule = "dltensor";

/// Runs for a capsule that nobody took; a consumer renames the one that it takes.
void destroy_capsule(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, kUnusedCapsule)) return;
  auto* managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule, kUnusedCapsule));
  managed->deleter(managed);
}

nb::dlpack::device device_of(const TensorView& view) noexcept {
  if (view.cuda_device == kHostMemory) {
    return {.device_type = nb::device::cpu::value, .device_id = 0};
  }
  return {.device_type = nb::device::cuda::value, .device_id = view.cuda_device};
}

nb::object make_capsule(const Owner<void>& storage, const TensorView& view) {
  auto* managed = new ManagedTensor{.tensor = {},
                                    .context = nullptr,
                                    .deleter = [](ManagedTensor* self) { delete self; },
                                    .shape = view.shape,
                                    .strides = view.strides,
                                    .storage = storage};
  managed->tensor = {.data = view.data,
                     .device = device_of(view),
                     .ndim = view.num_dims,
                     .dtype = to_dlpack(view.dtype),
                     .shape = managed->shape.data(),
                     .strides = managed->strides.data(),
                     .byte_offset = 0};
  PyObject* capsule = PyCapsule_New(managed, kUnusedCapsule, destroy_capsule);
  if (capsule == nullptr) {
    managed->deleter(managed);
    throw nb::python_error();
  }
  return nb::steal(capsule);
}

/// A Tensor that Python owns.
struct PyTensor {
  TensorView view;
  Owner<void> storage;
};

}  // namespace

nb::object to_python(const Tensor& tensor) {
  if (!tensor.is_given()) return nb::none();
  return nb::cast(PyTensor{.view = tensor.view, .storage = Owner<void>(tensor.storage)});
}

void bind_tensor(nb::module_& module) {
  nb::enum_<DType>(module, "DType", "Element types that cross the API.")
      .value("uint8", DType::kUInt8)
      .value("int32", DType::kInt32)
      .value("int64", DType::kInt64)
      .value("float32", DType::kFloat32)
      .value("bfloat16", DType::kBFloat16)
      .value("float8_e4m3fn", DType::kFloat8E4M3);

  nb::class_<TensorView>(
      module, "TensorView",
      "A borrowed tensor of one or two dimensions: whoever makes it keeps the memory alive.")
      .def("__repr__", &describe);
  // A function instead of a constructor: torch.compile takes a constructor apart and calls __new__
  // alone.
  module.def("make_view", &make_view, "data"_a, "dtype"_a, "shape"_a, "strides"_a,
             "cuda_device"_a = kHostMemory,
             "A TensorView; `data` is an address, `strides` count elements, `cuda_device` is the "
             "ordinal of the GPU, -1: memory of the host.");

  nb::class_<PyTensor>(
      module, "Tensor",
      "Memory of the library with a shape. Its DLPack capsules share that memory and keep it "
      "alive; float8_e4m3fn travels as uint8, since few consumers know it.")
      .def_prop_ro("dtype", [](const PyTensor& self) { return self.view.dtype; })
      .def_prop_ro(
          "shape",
          [](const PyTensor& self) { return to_tuple(self.view.shape, self.view.num_dims); })
      .def_prop_ro(
          "strides",
          [](const PyTensor& self) { return to_tuple(self.view.strides, self.view.num_dims); })
      .def(
          "__dlpack__",
          [](const PyTensor& self, const nb::kwargs& /*stream, max_version, …*/) {
            return make_capsule(self.storage, self.view);
          },
          "options"_a)
      .def("__dlpack_device__",
           [](const PyTensor& self) {
             const nb::dlpack::device device = device_of(self.view);
             return nb::make_tuple(device.device_type, device.device_id);
           })
      .def("__repr__", [](const PyTensor& self) { return describe(self.view); });
}

}  // namespace deep_ep::python
