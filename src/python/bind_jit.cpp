#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "deep_ep/jit.hpp"
#include "python/bind.hpp"

namespace deep_ep::python {

void bind_jit(nb::module_& module) {
  module.def("set_nvrtc_folders", &set_nvrtc_folders, "folders"_a,
             "Where else to look for NVRTC, after all other places.");
}

}  // namespace deep_ep::python
