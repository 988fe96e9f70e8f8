#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "deep_ep/topology.hpp"
#include "python/bind.hpp"

namespace deep_ep::python {

void bind_topology(nb::module_& module) {
  nb::class_<Topology>(module, "Topology",
                       "The place of one rank in its scale-up and scale-out domain.")
      .def_ro("rank_idx", &Topology::rank_idx)
      .def_ro("num_ranks", &Topology::num_ranks)
      .def_ro("num_scaleout_ranks", &Topology::num_scaleout_ranks)
      .def_ro("num_scaleup_ranks", &Topology::num_scaleup_ranks)
      .def_prop_ro("scaleout_rank_idx", &Topology::scaleout_rank_idx)
      .def_prop_ro("scaleup_rank_idx", &Topology::scaleup_rank_idx);
  module.def(
      "topology_from_host_ids", &topology_from_host_ids, "rank_idx"_a, "host_ids"_a,
      "The physical topology of a group from the host identity of each rank, in rank order.");
  module.def("logical_topology", &logical_topology, "physical"_a, "allow_hybrid_mode"_a,
             "The topology that the routing uses.");
}

}  // namespace deep_ep::python
