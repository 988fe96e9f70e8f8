#include "python/bind.hpp"

NB_MODULE(_core, module) {
  // Programs end with buffers in globals; that is no leak worth a message.
  nanobind::set_leak_warnings(false);
  module.doc() = "The C++ library as it is; `deep_ep` is the package to use.";
  deep_ep::python::bind_errors(module);
  deep_ep::python::bind_lifetime(module);
  deep_ep::python::bind_tensor(module);
  deep_ep::python::bind_event(module);
  deep_ep::python::bind_topology(module);
  deep_ep::python::bind_bootstrap(module);
  deep_ep::python::bind_ep(module);
  deep_ep::python::bind_ceilings(module);
  deep_ep::python::bind_jit(module);
}
