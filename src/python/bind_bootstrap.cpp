#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "python/bind.hpp"

namespace deep_ep::python {
namespace {

nb::bytes to_python_bytes(std::span<const std::byte> bytes) {
  return nb::bytes(bytes.data(), bytes.size());
}

std::span<const std::byte> bytes_of(const nb::bytes& bytes) noexcept {
  return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

std::chrono::nanoseconds to_nanoseconds(double secs) {
  // A clock of 64-bit nanoseconds ends after 292 years.
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(std::clamp(secs, 0.0, 1e9)));
}

std::vector<Bytes> gather_through(PyObject* function, std::span<const std::byte> message) {
  const nb::gil_scoped_acquire gil;
  std::vector<Bytes> messages;
  for (const nb::handle item : nb::borrow(function)(to_python_bytes(message))) {
    if (!nb::isinstance<nb::bytes>(item))
      throw nb::type_error("all_gather must return a list of bytes");
    const std::span<const std::byte> bytes = bytes_of(nb::borrow<nb::bytes>(item));
    messages.emplace_back(bytes.begin(), bytes.end());
  }
  return messages;
}

PyBootstrap from_callback(int rank_idx, int num_ranks, const nb::callable& all_gather,
                          std::optional<std::string> host_id) {
  auto gather = [function = share(all_gather)](std::span<const std::byte> message) {
    return gather_through(static_cast<PyObject*>(function.get()), message);
  };
  return PyBootstrap(make_callback_bootstrap(rank_idx, num_ranks, std::move(gather),
                                             host_id ? *std::move(host_id) : default_host_id()));
}

std::vector<PyBootstrap> from_threads(int num_ranks, double timeout_secs,
                                      std::vector<std::string> host_ids) {
  std::vector<PyBootstrap> bootstraps;
  for (std::shared_ptr<Bootstrap>& bootstrap :
       make_thread_bootstraps(num_ranks, to_nanoseconds(timeout_secs), std::move(host_ids))) {
    bootstraps.emplace_back(std::move(bootstrap));
  }
  return bootstraps;
}

PyBootstrap from_tcp(int rank_idx, int num_ranks, const std::string& address, int port,
                     double timeout_secs, std::optional<std::string> host_id) {
  const Unlocked unlocked;
  return PyBootstrap(make_tcp_bootstrap(rank_idx, num_ranks, address, port,
                                        to_nanoseconds(timeout_secs),
                                        host_id ? *std::move(host_id) : default_host_id()));
}

PyBootstrap from_env(double timeout_secs) {
  const Unlocked unlocked;
  return PyBootstrap(make_env_bootstrap(to_nanoseconds(timeout_secs)));
}

nb::list all_gather(const PyBootstrap& bootstrap, const nb::bytes& message) {
  std::vector<Bytes> messages;
  {
    const Unlocked unlocked;
    messages = bootstrap->all_gather(bytes_of(message));
  }
  nb::list result;
  for (const Bytes& bytes : messages) result.append(to_python_bytes(bytes));
  return result;
}

}  // namespace

void bind_bootstrap(nb::module_& module) {
  nb::class_<PyBootstrap>(module, "Bootstrap",
                          "One rank's end of a group; used by one thread at a time.")
      .def_prop_ro("rank_idx", [](const PyBootstrap& self) { return self->rank_idx(); })
      .def_prop_ro("num_ranks", [](const PyBootstrap& self) { return self->num_ranks(); })
      .def_prop_ro("host_id", [](const PyBootstrap& self) { return self->host_id(); })
      .def("all_gather", &all_gather, "message"_a,
           nb::sig("def all_gather(self, message: bytes) -> list[bytes]"),
           "Gathers one message of each rank, in rank order. Blocks.");

  module.def("make_callback_bootstrap", &from_callback, "rank_idx"_a, "num_ranks"_a, "all_gather"_a,
             "host_id"_a.none() = nb::none(),
             "Gathers through `all_gather(bytes) -> list[bytes]`, e.g. one that asks a torch "
             "process group.");
  module.def(
      "make_thread_bootstraps", &from_threads, "num_ranks"_a, "timeout_secs"_a = 300.0,
      "host_ids"_a = std::vector<std::string>{},
      "The ends of a group whose ranks are threads of this process: give one to each thread.");
  module.def("make_tcp_bootstrap", &from_tcp, "rank_idx"_a, "num_ranks"_a, "address"_a, "port"_a,
             "timeout_secs"_a = 300.0, "host_id"_a.none() = nb::none(),
             "Meets at a TCP address where rank 0 listens. Blocks until all ranks have come.");
  module.def("make_env_bootstrap", &from_env, "timeout_secs"_a = 300.0,
             "The same, with what RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say.");
}

}  // namespace deep_ep::python
