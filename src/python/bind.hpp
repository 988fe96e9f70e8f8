#pragma once
// What the binding files share: one function a file, and how objects of the two languages own each
// other.
//
// Python references that C++ holds may be dropped by any thread, at any time, also while the
// interpreter shuts down. Taking the GIL there can hang or kill that thread, so they are put on a
// list instead, which a thread that has the GIL empties.
#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/event.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep::python {

namespace nb = nanobind;
using namespace nb::literals;

void bind_errors(nb::module_& module);
void bind_lifetime(nb::module_& module);
void bind_tensor(nb::module_& module);
void bind_event(nb::module_& module);
void bind_topology(nb::module_& module);
void bind_bootstrap(nb::module_& module);
void bind_ep(nb::module_& module);
void bind_ceilings(nb::module_& module);
void bind_jit(nb::module_& module);

/// Owns a reference to `object`, without the GIL; None gives null. Needs the GIL.
std::shared_ptr<void> share(const nb::object& object);

/// Drops the references that other threads gave back. Needs the GIL.
void drop_released_references() noexcept;

/// Counts the forks that led from the process that imported the module to this one.
int fork_generation() noexcept;

/// Releases the GIL while it lives, then drops what was given back meanwhile.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    PyEval_RestoreThread(state_);
    drop_released_references();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

/// A shared object of the library that a Python object owns. A forked child inherits memory and no
/// threads, and the ranks do not count it as one of them: there the object is left alone.
template <typename T>
class Owner {
 public:
  explicit Owner(std::shared_ptr<T> object) : object_(std::move(object)) {}
  Owner(const Owner&) = default;
  Owner(Owner&&) noexcept = default;
  Owner& operator=(const Owner&) = delete;
  Owner& operator=(Owner&&) = delete;
  ~Owner() {
    if (!is_of_this_process()) new std::shared_ptr<T>(std::move(object_));
  }

  /// False in a forked child of the process that made the object.
  bool is_of_this_process() const noexcept { return generation_ == fork_generation(); }

  T* operator->() const noexcept { return object_.get(); }
  const std::shared_ptr<T>& get() const noexcept { return object_; }
  void reset() noexcept { object_.reset(); }

 private:
  std::shared_ptr<T> object_;
  int generation_ = fork_generation();
};

struct PyBootstrap : Owner<Bootstrap> {
  using Owner::Owner;
};

/// A `_core.Tensor`, or None if none was asked for.
nb::object to_python(const Tensor& tensor);

}  // namespace deep_ep::python
