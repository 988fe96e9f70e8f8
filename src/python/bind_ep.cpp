#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>

#include "deep_ep/ep_buffer.hpp"
#include "python/bind.hpp"

namespace deep_ep::python {
namespace {

struct PyHandle : Owner<const EPHandle> {
  using Owner::Owner;
};

struct PyBuffer : Owner<EPBuffer> {
  using Owner::Owner;
  PyBuffer(const PyBuffer&) = delete;
  PyBuffer& operator=(const PyBuffer&) = delete;
  ~PyBuffer() {
    if (!is_of_this_process()) return;
    const Unlocked unlocked;  // the end of a buffer may wait for its last calls
    reset();
  }
};

struct PyPendingDispatch : Owner<const PendingDispatch> {
  using Owner::Owner;
};

struct PyPendingCombine : Owner<const PendingCombine> {
  using Owner::Owner;
};

TensorView view_or_none(const TensorView* view) { return view == nullptr ? TensorView{} : *view; }

std::shared_ptr<const EPHandle> handle_or_none(const PyHandle* handle) {
  return handle == nullptr ? nullptr : handle->get();
}

void init_buffer(PyBuffer* self, const PyBootstrap& bootstrap, std::int64_t num_bytes,
                 int num_max_tokens_per_rank, int hidden, int num_topk, bool use_fp8_dispatch,
                 bool allow_hybrid_mode, bool allow_multiple_reduction, double timeout_secs,
                 int cuda_device) {
  const EPBufferOptions options{.num_bytes = num_bytes,
                                .num_max_tokens_per_rank = num_max_tokens_per_rank,
                                .hidden = hidden,
                                .num_topk = num_topk,
                                .use_fp8_dispatch = use_fp8_dispatch,
                                .allow_hybrid_mode = allow_hybrid_mode,
                                .allow_multiple_reduction = allow_multiple_reduction,
                                .cuda_device = cuda_device,
                                .timeout_secs = timeout_secs};
  const Unlocked unlocked;
  new (self) PyBuffer(std::make_shared<EPBuffer>(bootstrap.get(), options));
}

PyPendingDispatch dispatch(const PyBuffer& self, const TensorView& x, const TensorView* x_sf,
                           const TensorView* topk_idx, const TensorView* topk_weights,
                           const TensorView* cumulative_local_expert_recv_stats, int num_experts,
                           int num_max_tokens_per_rank, int expert_alignment, int num_sms,
                           const PyHandle* handle, bool do_cpu_sync, bool do_expand,
                           bool do_zero_padding, bool use_tma_aligned_col_major_sf, bool is_async,
                           const Event* previous_event, std::uintptr_t stream,
                           const nb::object& keep_alive) {
  const DispatchArgs args{
      .x = x,
      .x_sf = view_or_none(x_sf),
      .topk_idx = view_or_none(topk_idx),
      .topk_weights = view_or_none(topk_weights),
      .cumulative_local_expert_recv_stats = view_or_none(cumulative_local_expert_recv_stats),
      .num_experts = num_experts,
      .num_max_tokens_per_rank = num_max_tokens_per_rank,
      .expert_alignment = expert_alignment,
      .num_sms = num_sms,
      .handle = handle_or_none(handle),
      .do_cpu_sync = do_cpu_sync,
      .do_expand = do_expand,
      .do_zero_padding = do_zero_padding,
      .use_tma_aligned_col_major_sf = use_tma_aligned_col_major_sf,
      .is_async = is_async,
      .previous_event = previous_event == nullptr ? Event() : *previous_event,
      .stream = reinterpret_cast<void*>(stream),
      .keep_alive = share(keep_alive)};
  const Unlocked unlocked;
  return PyPendingDispatch(std::make_shared<const PendingDispatch>(self->dispatch(args)));
}

nb::tuple dispatch_outputs(const PyPendingDispatch& self) {
  const DispatchOutputs outputs = [&] {
    const Unlocked unlocked;
    return self->outputs();
  }();
  return nb::make_tuple(to_python(outputs.recv_x), to_python(outputs.recv_x_sf),
                        to_python(outputs.recv_topk_idx), to_python(outputs.recv_topk_weights),
                        PyHandle(outputs.handle));
}

PyPendingCombine combine(const PyBuffer& self, const TensorView& x, const PyHandle& handle,
                         const TensorView* topk_weights, const TensorView* bias_0,
                         const TensorView* bias_1, int num_sms, bool is_async, bool defer_epilogue,
                         const Event* previous_event, std::uintptr_t stream,
                         const nb::object& keep_alive) {
  const CombineArgs args{.x = x,
                         .handle = handle.get(),
                         .topk_weights = view_or_none(topk_weights),
                         .bias = {view_or_none(bias_0), view_or_none(bias_1)},
                         .num_sms = num_sms,
                         .is_async = is_async,
                         .defer_epilogue = defer_epilogue,
                         .previous_event = previous_event == nullptr ? Event() : *previous_event,
                         .stream = reinterpret_cast<void*>(stream),
                         .keep_alive = share(keep_alive)};
  const Unlocked unlocked;
  return PyPendingCombine(std::make_shared<const PendingCombine>(self->combine(args)));
}

nb::tuple combine_outputs(const PyPendingCombine& self, std::uintptr_t stream) {
  const CombineOutputs outputs = [&] {
    const Unlocked unlocked;
    return self->outputs(reinterpret_cast<void*>(stream));
  }();
  return nb::make_tuple(to_python(outputs.combined_x), to_python(outputs.combined_topk_weights));
}

void bind_handle(nb::module_& module) {
  nb::class_<PyHandle> handle(module, "EPHandle", "The routing of one dispatch.");
  const auto number = [&](const char* name, auto field) {
    handle.def_prop_ro(name, [field](const PyHandle& self) { return (*self.get()).*field; });
  };
  number("num_experts", &EPHandle::num_experts);
  number("num_topk", &EPHandle::num_topk);
  number("expert_alignment", &EPHandle::expert_alignment);
  number("num_max_tokens_per_rank", &EPHandle::num_max_tokens_per_rank);
  number("num_sms", &EPHandle::num_sms);
  number("do_expand", &EPHandle::do_expand);
  number("has_exact_counts", &EPHandle::has_exact_counts);
  number("num_tokens", &EPHandle::num_tokens);
  number("num_recv_tokens", &EPHandle::num_recv_tokens);
  number("num_expanded_tokens", &EPHandle::num_expanded_tokens);
  number("num_recv_tokens_per_expert_list", &EPHandle::num_recv_tokens_per_expert_list);
  const auto tensor = [&](const char* name, Tensor EPHandle::*field) {
    handle.def_prop_ro(
        name, [field](const PyHandle& self) { return to_python((*self.get()).*field); },
        nb::sig((std::string("def ") + name + "(self) -> Tensor | None").c_str()));
  };
  tensor("psum_num_recv_tokens_per_scaleup_rank", &EPHandle::psum_num_recv_tokens_per_scaleup_rank);
  tensor("psum_num_recv_tokens_per_expert", &EPHandle::psum_num_recv_tokens_per_expert);
  tensor("num_unaligned_recv_tokens_per_expert", &EPHandle::num_unaligned_recv_tokens_per_expert);
  tensor("recv_src_metadata", &EPHandle::recv_src_metadata);
  tensor("dst_rows", &EPHandle::dst_rows);
}

void bind_pending(nb::module_& module) {
  nb::class_<PyPendingDispatch>(module, "PendingDispatch", "A dispatch under way.")
      .def("outputs", &dispatch_outputs,
           nb::sig("def outputs(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | "
                   "None, EPHandle]"),
           "recv_x, recv_x_sf, recv_topk_idx, recv_topk_weights and the handle, once their shapes "
           "are known; "
           "contents are valid when the event is done.")
      .def("event", [](const PyPendingDispatch& self) { return self->event(); });
  nb::class_<PyPendingCombine>(module, "PendingCombine", "A combine under way.")
      .def("outputs", &combine_outputs, "stream"_a = 0,
           nb::sig("def outputs(self, stream: int = 0) -> tuple[Tensor, Tensor | None]"),
           "combined_x and combined_topk_weights; contents are valid when the event is done. With "
           "a deferred epilogue: waits for the event and runs the epilogue, on CUDA ranks after "
           "what the stream holds.")
      .def("event", [](const PyPendingCombine& self) { return self->event(); });
}

void bind_buffer(nb::module_& module) {
  nb::class_<BufferSizeHint>(module, "BufferSizeHint",
                             "Bytes of a buffer that serves a shape, by use.")
      .def_ro("lent_bytes", &BufferSizeHint::lent_bytes)
      .def_ro("staging_bytes", &BufferSizeHint::staging_bytes)
      .def_ro("num_bytes", &BufferSizeHint::num_bytes);

  nb::class_<PyBuffer>(module, "EPBuffer", "Dispatch and combine over the ranks of one group.")
      .def("__init__", &init_buffer, "bootstrap"_a, nb::kw_only(), "num_bytes"_a = 0,
           "num_max_tokens_per_rank"_a = 0, "hidden"_a = 0, "num_topk"_a = 0,
           "use_fp8_dispatch"_a = false, "allow_hybrid_mode"_a = true,
           "allow_multiple_reduction"_a = true, "timeout_secs"_a = 300.0,
           "cuda_device"_a = kHostMemory)
      .def_static("size_hint", &EPBuffer::size_hint, "logical"_a, "num_max_tokens_per_rank"_a,
                  "hidden"_a, "num_topk"_a, "use_fp8_dispatch"_a, "allow_multiple_reduction"_a)
      .def("dispatch", &dispatch, nb::kw_only(), "x"_a, "x_sf"_a.none() = nb::none(),
           "topk_idx"_a.none() = nb::none(), "topk_weights"_a.none() = nb::none(),
           "cumulative_local_expert_recv_stats"_a.none() = nb::none(), "num_experts"_a = 0,
           "num_max_tokens_per_rank"_a = 0, "expert_alignment"_a = 0, "num_sms"_a = 0,
           "handle"_a.none() = nb::none(), "do_cpu_sync"_a = true, "do_expand"_a = false,
           "do_zero_padding"_a = false, "use_tma_aligned_col_major_sf"_a = false,
           "is_async"_a = false, "previous_event"_a.none() = nb::none(), "stream"_a = 0,
           "keep_alive"_a.none() = nb::none())
      .def("combine", &combine, nb::kw_only(), "x"_a, "handle"_a,
           "topk_weights"_a.none() = nb::none(), "bias_0"_a.none() = nb::none(),
           "bias_1"_a.none() = nb::none(), "num_sms"_a = 0, "is_async"_a = false,
           "defer_epilogue"_a = false, "previous_event"_a.none() = nb::none(), "stream"_a = 0,
           "keep_alive"_a.none() = nb::none())
      .def(
          "refuse_call",
          [](const PyBuffer& self, const std::string& reason) { self->refuse_call(reason); },
          "reason"_a, "Takes part in the next call only to say that this rank can't make it.")
      .def(
          "barrier",
          [](const PyBuffer& self, std::uintptr_t stream) {
            const Unlocked unlocked;
            return self->barrier(reinterpret_cast<void*>(stream));
          },
          "stream"_a = 0)
      .def_prop_ro("comm_stream",
                   [](const PyBuffer& self) {
                     return reinterpret_cast<std::uintptr_t>(self->comm_stream());
                   })
      .def_prop_ro("num_device_sms", [](const PyBuffer& self) { return self->num_device_sms(); })
      .def(
          "empty",
          [](const PyBuffer& self, std::int64_t num_rows, std::int64_t num_columns, DType dtype,
             std::uintptr_t stream) {
            return to_python(
                self->empty(num_rows, num_columns, dtype, reinterpret_cast<void*>(stream)));
          },
          "num_rows"_a, "num_columns"_a, "dtype"_a, "stream"_a = 0,
          nb::sig("def empty(self, num_rows: int, num_columns: int, dtype: DType, stream: int = 0) "
                  "-> Tensor"))
      .def("destroy",
           [](const PyBuffer& self) {
             const Unlocked unlocked;
             self->destroy();
           })
      .def_prop_ro("num_bytes", [](const PyBuffer& self) { return self->options().num_bytes; })
      .def_prop_ro("physical_topology",
                   [](const PyBuffer& self) { return self->physical_topology(); })
      .def_prop_ro("logical_topology",
                   [](const PyBuffer& self) { return self->logical_topology(); });
}

int estimate_num_sms(const Topology& physical, const Topology& logical, int num_experts,
                     int num_topk, double rdma_gbs, double nvlink_gbs, double sm_read_gbs,
                     double sm_write_gbs, bool prefer_overlap_with_compute, int num_device_sms) {
  return theoretical_num_sms({.physical = physical,
                              .logical = logical,
                              .num_experts = num_experts,
                              .num_topk = num_topk,
                              .rdma_gbs = rdma_gbs,
                              .nvlink_gbs = nvlink_gbs,
                              .sm_read_gbs = sm_read_gbs,
                              .sm_write_gbs = sm_write_gbs,
                              .prefer_overlap_with_compute = prefer_overlap_with_compute,
                              .num_device_sms = num_device_sms});
}

}  // namespace

void bind_ep(nb::module_& module) {
  bind_handle(module);
  bind_pending(module);
  bind_buffer(module);
  module.def("theoretical_num_sms", &estimate_num_sms, nb::kw_only(), "physical"_a, "logical"_a,
             "num_experts"_a, "num_topk"_a, "rdma_gbs"_a = 0.0, "nvlink_gbs"_a = 0.0,
             "sm_read_gbs"_a = 0.0, "sm_write_gbs"_a = 0.0, "prefer_overlap_with_compute"_a = true,
             "num_device_sms"_a = 0);
  module.def("theoretical_num_qps", &theoretical_num_qps, "num_sms"_a, "allow_hybrid_mode"_a,
             "num_allocated_qps"_a);
}

}  // namespace deep_ep::python
