#include <cstdint>

#include "deep_ep/event.hpp"
#include "python/bind.hpp"

namespace deep_ep::python {

void bind_event(nb::module_& module) {
  nb::class_<Event>(module, "Event", "A point in the work of a buffer.")
      .def(nb::init<>(), "A point that has already been reached.")
      .def("is_done", &Event::is_done,
           "True once the work is over, whether it succeeded or failed.")
      .def(
          "wait",
          [](const Event& self) {
            const Unlocked unlocked;
            self.wait();
          },
          "Blocks until the work is over; raises what it ended with, on each call.")
      .def(
          "wait_on",
          [](const Event& self, std::uintptr_t stream) {
            const Unlocked unlocked;
            self.wait_on(reinterpret_cast<void*>(stream));
          },
          "stream"_a,
          "Makes what is put on a CUDA stream from now on start after the work; work of CPU ranks "
          "is waited for at once.");
  module.def(
      "record_event",
      [](int cuda_device, std::uintptr_t stream) {
        return record_event(cuda_device, reinterpret_cast<void*>(stream));
      },
      "cuda_device"_a, "stream"_a, "A point after all that has been put on a CUDA stream.");
}

}  // namespace deep_ep::python
