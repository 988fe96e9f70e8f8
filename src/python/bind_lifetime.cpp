#include <pthread.h>

#include <atomic>
#include <thread>

#include "python/bind.hpp"

namespace deep_ep::python {
namespace {

/// A Python reference on the list of those that C++ no longer needs.
struct Reference {
  PyObject* object;
  Reference* next = nullptr;
};

// Constant-initialised and never destroyed: other threads use them until the process is gone.
std::atomic<Reference*> released{nullptr};
std::atomic<bool> is_drop_scheduled{false};
std::atomic<bool> is_interpreter_ending{false};
std::atomic<int> num_schedulers{
    0};  // threads between "is the interpreter there?" and their last use of it
std::atomic<int> generation{0};

int drop_from_interpreter(void* /*argument*/) {
  is_drop_scheduled.store(false);
  drop_released_references();
  return 0;
}

/// Gives a reference back, without the GIL. Once the interpreter ends, references are left alone.
void release(Reference* reference) noexcept {
  reference->next = released.load();
  while (!released.compare_exchange_weak(reference->next, reference)) {
  }
  num_schedulers.fetch_add(1);
  if (!is_interpreter_ending.load() && !is_drop_scheduled.exchange(true) &&
      Py_AddPendingCall(drop_from_interpreter, nullptr) != 0) {
    is_drop_scheduled.store(false);  // its queue is full: the next call of this module drops them
  }
  num_schedulers.fetch_sub(1);
}

void end_interpreter() noexcept {
  is_interpreter_ending.store(true);
  while (num_schedulers.load() != 0) std::this_thread::yield();
}

void enter_forked_child() noexcept {
  generation.fetch_add(1);
  num_schedulers.store(0);  // those threads stayed behind
  is_drop_scheduled.store(false);
}

}  // namespace

std::shared_ptr<void> share(const nb::object& object) {
  if (object.is_none()) return nullptr;
  auto* reference = new Reference{.object = object.ptr()};
  Py_INCREF(reference->object);
  return std::shared_ptr<void>(reference->object, [reference](void*) { release(reference); });
}

void drop_released_references() noexcept {
  if (released.load(std::memory_order_relaxed) == nullptr) return;
  for (Reference* reference = released.exchange(nullptr); reference != nullptr;) {
    Reference* next = reference->next;
    Py_DECREF(reference->object);
    delete reference;
    reference = next;
  }
}

int fork_generation() noexcept { return generation.load(std::memory_order_relaxed); }

void bind_lifetime(nb::module_& /*module*/) {
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(end_interpreter));
  pthread_atfork(nullptr, nullptr, enter_forked_child);
}

}  // namespace deep_ep::python
