#include "deep_ep/ceilings.hpp"
#include "python/bind.hpp"

namespace deep_ep::python {

void bind_ceilings(nb::module_& module) {
  module.def(
      "copy_rows_seconds",
      [](int num_rows, int row_bytes, int num_threads, int num_iters) {
        const Unlocked unlocked;
        return copy_rows_seconds(num_rows, row_bytes, num_threads, num_iters);
      },
      "num_rows"_a, "row_bytes"_a, "num_threads"_a, "num_iters"_a,
      "Median seconds of copying scattered rows to consecutive ones.");
  module.def(
      "sum_rows_seconds",
      [](int num_outputs, int num_terms, int hidden, int num_threads, int num_iters) {
        const Unlocked unlocked;
        return sum_rows_seconds(num_outputs, num_terms, hidden, num_threads, num_iters);
      },
      "num_outputs"_a, "num_terms"_a, "hidden"_a, "num_threads"_a, "num_iters"_a,
      "Median seconds of BF16 rows that are each the sum of num_terms scattered rows.");
}

}  // namespace deep_ep::python
