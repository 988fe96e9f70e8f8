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
          "Blocks until the work is over; raises what it ended with, on each call.");
}

}  // namespace deep_ep::python
