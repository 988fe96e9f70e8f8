"""`EPBuffer`: sends tokens to the ranks of their experts (dispatch), sums what returns (combine).

Letters in shapes: R ranks, E experts, L = E / R experts of a rank, T tokens of this rank, M the
most tokens of any rank, H hidden, K top-k, P scale packs of a token, A expert alignment, N tokens
that this rank receives. Expert e lives on rank e // L. Token i of rank s has the global id
s * M + i.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING, Any

from deep_ep import _core, comm
from deep_ep._core import ContractError
from deep_ep.buffers.ep_handle import EPHandle
from deep_ep.device import CPU, ordinal_of
from deep_ep.glue import load_torch_glue, outside_graphs
from deep_ep.utils.event import EventHandle, EventOverlap, core_event_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    Input = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    Bias = torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None]

__all__ = ["EPBuffer", "EPHandle"]

# Queue pairs of a NIC that the original reserves if asked for none; this library uses no NIC.
NUM_QPS_HYBRID = 129
NUM_QPS_DIRECT = 17


class EPBuffer:
    """Dispatch and combine over the ranks of one group.

    Calls are collective: all ranks make the same calls in the same order, with any number of
    tokens each. One thread at a time may be in a call. A call with bad values raises on its rank
    before any token moves and on the others with the same text, and the buffer stays usable. A
    call that a rank misses raises TimeoutError on the others, and RuntimeError if that rank is
    known to be gone; later calls then raise the same.

    The buffer is released with its last reference, or by `destroy()`. Neither waits for other
    ranks, and results stay valid.

    Attributes:
        group: The group, the very object that was passed.
        rank_idx: The index of this rank.
        num_ranks: The number of ranks.
        num_bytes: Size of the exchange area in bytes, as chosen.
        num_lb_bytes: Size of the load balancing area in bytes: 0.
        num_max_tokens_per_rank: M of calls that name none.
        num_allocated_qps: The most queue pairs of a call.
        allow_hybrid_mode: As passed, as are the following.
        allow_multiple_reduction:
        prefer_overlap_with_compute:
        deterministic:
        explicitly_destroy:
        num_scaleout_ranks: Domains that the routing tells apart; `scaleout_rank_idx` is ours.
        num_scaleup_ranks: Ranks in each of them; `scaleup_rank_idx` is our index there.
        num_rdma_ranks: The number of machines.
        num_nvlink_ranks: Ranks on each machine.
        device_idx: The number of the GPU where the tensors lie; -1: the CPU.
        runtime: The C++ buffer, opaque; None once destroyed.
        context: Where the ranks are, opaque; None once destroyed.
        nccl_comm_handle: None: NCCL is not used.
    """

    # For instances whose construction failed, or whose class had its `__init__` replaced.
    runtime: _core.EPBuffer | None = None
    context: _core.Topology | None = None
    nccl_comm_handle: None = None
    device_idx: int = CPU
    explicitly_destroy: bool = False

    def __init__(
        self,
        group: comm.ProcessGroupLike,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: int = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        """Makes the buffer. Collective.

        Args:
            group: A torch process group of any backend, a wrapper of one, or a
                `deep_ep.comm.Group`.
            num_bytes: Size of the exchange area in bytes, a positive multiple of 2 MiB. None: sized
                from the four arguments below; see `get_buffer_size_hint`.
            num_max_tokens_per_rank: M of calls that name none, and for sizing.
            hidden: H in elements, for sizing; calls may use another.
            num_topk: K, for sizing; 0: 32.
            use_fp8_dispatch: Size for FP8 tokens with scales.
            lb_allocation_plan_or_num_bytes: 0: expert load balancing is not offered yet.
            deterministic: No effect: order and bytes of results never depend on timing.
            allow_hybrid_mode: Route in two levels when there are several scale-up domains.
            allow_multiple_reduction: Rows of one token may be summed and rounded to BF16 on their
                way. False: one rounding, more traffic.
            prefer_overlap_with_compute: Estimate few SMs, see `get_theoretical_num_sms`.
            sl_idx: No effect: service level of a NIC.
            num_allocated_qps: Queue pairs of a NIC; 0: automatic. None are used.
            num_cpu_timeout_secs: Limit of every wait for another rank, in seconds, on CPU ranks.
            num_gpu_timeout_secs: The same on CUDA ranks. `EP_TIMEOUT_SECS` overrides both.
            explicitly_destroy: `destroy()` will be called; if it is not, a ResourceWarning says so.
            device: Where this rank's tensors lie: `"cpu"`, `"cuda"`, `"cuda:1"` or a number of a
                GPU. None: `EP_DEVICE`, else torch's current GPU if there is one, else the CPU.
                Ranks that share a GPU and a process need a stream each.

        Raises:
            TypeError: `group` is no group.
            ContractError: A size is impossible, or settings differ between ranks: it lists them.
            NotImplementedError: The ranks of a host are no neighbours, or hosts have unequal
                numbers of ranks, or load balancing was asked for, or a GPU without a driver, or
                GPUs that can't address each other.
            TimeoutError: Some ranks did not come.
        """
        if num_bytes is not None and num_bytes <= 0:
            raise ContractError(f"num_bytes must be a positive multiple of 2 MiB, got {num_bytes}")
        if lb_allocation_plan_or_num_bytes != 0:
            raise NotImplementedError(
                "lb_allocation_plan_or_num_bytes must be 0: load balancing is not offered"
            )
        if sys.modules.get("torch") is not None:  # before torch.compile sees a call
            load_torch_glue("EPBuffer")
        bootstrap = comm.bootstrap_of(group)
        self.device_idx = ordinal_of(device)
        # What the C++ side does not know; it compares the rest itself.
        _require_uniform(
            bootstrap,
            device_type="cpu" if self.device_idx == CPU else "cuda",
            deterministic=bool(deterministic),
            prefer_overlap_with_compute=bool(prefer_overlap_with_compute),
            num_allocated_qps=_to_int("num_allocated_qps", num_allocated_qps),
        )
        self.runtime = _core.EPBuffer(
            bootstrap,
            num_bytes=_to_int("num_bytes", num_bytes),
            num_max_tokens_per_rank=_to_int("num_max_tokens_per_rank", num_max_tokens_per_rank),
            hidden=_to_int("hidden", hidden),
            num_topk=_to_int("num_topk", num_topk),
            use_fp8_dispatch=bool(use_fp8_dispatch),
            allow_hybrid_mode=bool(allow_hybrid_mode),
            allow_multiple_reduction=bool(allow_multiple_reduction),
            cuda_device=self.device_idx,
            timeout_secs=float(
                num_cpu_timeout_secs if self.device_idx == CPU else num_gpu_timeout_secs
            ),
        )
        self.group = group
        self.num_bytes = self.runtime.num_bytes
        self.num_lb_bytes = 0
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.deterministic = deterministic
        self.explicitly_destroy = explicitly_destroy
        self.num_allocated_qps = num_allocated_qps or (
            NUM_QPS_HYBRID if allow_hybrid_mode else NUM_QPS_DIRECT
        )

        self._physical = self.runtime.physical_topology
        self._logical = self.runtime.logical_topology
        self.context = self._logical
        self.rank_idx = self._logical.rank_idx
        self.num_ranks = self._logical.num_ranks
        self.num_scaleout_ranks = self._logical.num_scaleout_ranks
        self.num_scaleup_ranks = self._logical.num_scaleup_ranks
        self.scaleout_rank_idx = self._logical.scaleout_rank_idx
        self.scaleup_rank_idx = self._logical.scaleup_rank_idx
        self.num_rdma_ranks = self._physical.num_scaleout_ranks
        self.num_nvlink_ranks = self._physical.num_scaleup_ranks
        comm.remember_topology(group, self._physical)
        self._num_sms: dict[tuple, int] = {}
        self._pid = os.getpid()

    barrier = comm.barrier
    get_comm_stream = comm.get_comm_stream
    get_physical_domain_size = staticmethod(comm.get_physical_domain_size)
    get_logical_domain_size = staticmethod(comm.get_logical_domain_size)

    @property
    def main_context(self) -> _core.Topology | None:
        """The same as `context`."""
        return self.context

    @staticmethod
    def get_buffer_size_hint(
        group: comm.ProcessGroupLike,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """How large a buffer should be so that calls of this shape always find room.

        Collective the first time it is asked for a group, unless a buffer was made over it.

        Args:
            group: The group.
            num_max_tokens_per_rank: M.
            hidden: H in elements.
            num_topk: K; 0: 32.
            use_fp8_dispatch: Tokens are FP8 with scales.
            allow_hybrid_mode: As for the buffer.
            allow_multiple_reduction: As for the buffer.

        Returns:
            Bytes, a multiple of 2 MiB; never less for a larger shape.

        Raises:
            ContractError: A number is negative, or M or H is 0.
        """
        logical = _core.logical_topology(comm.topology_of(group), bool(allow_hybrid_mode))
        hint = _core.EPBuffer.size_hint(
            logical,
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            bool(use_fp8_dispatch),
            bool(allow_multiple_reduction),
        )
        return hint.num_bytes

    @staticmethod
    def capture() -> EventHandle:
        """An event that marks what the caller has done so far, on a GPU in the current stream."""
        return EventHandle()

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """How many SMs keep the links busy if the experts are equally loaded. Local.

        Args:
            num_experts: E.
            num_topk: K.
            num_scaleout_topk: 0: choosing domains before experts is not offered.
            rdma_gbs: Speed of the network of a rank in GB/s; 0: the library's own figure.
            nvlink_gbs: Speed of the scale-up links of a rank in GB/s; 0: as above.
            sm_read_gbs: What an SM reads in GB/s; 0: as above.
            sm_write_gbs: What an SM writes in GB/s; 0: as above.

        Returns:
            An even number, at least 4.

        Raises:
            ContractError: E is no positive multiple of the ranks, or K is not between 1 and E.
        """
        if num_scaleout_topk != 0:
            raise ContractError(f"num_scaleout_topk must be 0, got {num_scaleout_topk}")
        key = (num_experts, num_topk, rdma_gbs, nvlink_gbs, sm_read_gbs, sm_write_gbs)
        if key not in self._num_sms:
            self._num_sms[key] = _core.theoretical_num_sms(
                physical=self._physical,
                logical=self._logical,
                num_experts=num_experts,
                num_topk=num_topk,
                rdma_gbs=rdma_gbs,
                nvlink_gbs=nvlink_gbs,
                sm_read_gbs=sm_read_gbs,
                sm_write_gbs=sm_write_gbs,
                prefer_overlap_with_compute=bool(self.prefer_overlap_with_compute),
                num_device_sms=self._live_runtime("get_theoretical_num_sms").num_device_sms,
            )
        return self._num_sms[key]

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """How many queue pairs a call with `num_sms` SMs can use. Local."""
        return _core.theoretical_num_qps(
            num_sms, bool(self.allow_hybrid_mode), self.num_allocated_qps
        )

    @outside_graphs
    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in memory that the other ranks can read, contents unspecified. Local.

        Expert outputs written there are read by combine in place. The memory is the caller's until
        the last tensor on it is gone, also after `destroy()`. On a GPU only the current stream may
        use it when it goes; while that is captured into a graph, it stays the graph's.

        Args:
            shape: Any number of dimensions.
            dtype: One of uint8, int32, int64, float32, bfloat16, float8_e4m3fn.

        Returns:
            A contiguous tensor.

        Raises:
            ContractError: A size is negative, or the dtype is another.
            OSError: There is no memory.
        """
        glue = load_torch_glue("EPBuffer.empty")
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        num_rows = sizes[0] if sizes else 1
        tensor = self._live_runtime("empty").empty(
            num_rows,
            math.prod(sizes[1:]),
            glue.to_core_dtype("a lent tensor", dtype),
            self._current_stream(),
        )
        return glue.to_torch(tensor).view(sizes)

    @outside_graphs
    def dispatch(
        self,
        x: Input,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> (
        tuple[Input, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]
        | EventOverlap
    ):
        """Sends each token to every rank that has one of its experts, once a rank. Collective.

        Compact output: one row a received token, ordered by source rank, then token. Expanded
        output: one row for each pair of received token and local expert, grouped by expert; the
        rows of an expert start at a multiple of the alignment and are ordered as above, then by
        lane. Everything is copied bit by bit. All tensors lie where the buffer does. Inputs may
        require gradients or not, results do not (see `deep_ep.autograd`).

        On a GPU a synchronous call runs on the current stream, an asynchronous one on that of
        `get_comm_stream`, after what the current stream holds. With CPU sync the call blocks until
        the number of received tokens is known. Into a CUDA graph only calls without CPU sync can be
        captured, on all ranks alike; replays then are collective calls, too.

        Args:
            x: `[T, H]` bfloat16, contiguous; or a tuple of `[T, H]` float8_e4m3fn, contiguous, and
                its scales `[T, P]`, float32 or int32 (four UE8M0 each), any strides.
            topk_idx: `[T, K]` int64 or int32, contiguous: experts of each token, negative: none.
                Needed without `handle`, refused with it.
            topk_weights: `[T, K]` float32, contiguous; optional, also with `handle`.
            cumulative_local_expert_recv_stats: `[L]` int32, grows by the tokens that each local
                expert receives; optional, refused with `handle`.
            num_experts: E, a multiple of R; needed without `handle`.
            num_max_tokens_per_rank: M, equal on all ranks; None: the handle's, else the buffer's.
            expert_alignment: A, at least 1; None: the handle's, else 1.
            num_sms: The most SMs, kept in the handle; 0: the handle's, else an estimate. CPU ranks
                move rows with threads instead (`EP_CPU_THREADS`).
            num_qps: No effect: queue pairs, at most `num_allocated_qps`; 0: automatic.
            previous_event: Start after this event; needs `allocate_on_comm_stream`.
            async_with_compute_stream: Return before the exchange is over; results are valid once
                the event has been waited for, and inputs must not change before.
            allocate_on_comm_stream: No effect: results lie in the buffer's memory.
            handle: Repeat the routing of that dispatch with another x of T tokens.
            do_handle_copy: Must be False.
            do_cpu_sync: True: wait until the number of received tokens is known, exact shapes.
                False: shapes of the worst case; rows past the received ones are unspecified, and
                the handle's tensors say how many there are. None: True without `handle`; with it
                shapes are those of the handle's dispatch, and True is refused.
            do_expand: Expanded output; must be the same as the handle's.
            do_zero_padding: Expanded only: zero the rows that alignment adds; else unspecified.
            use_tma_aligned_col_major_sf: Received scales are column-major, strides
                `(1, n rounded up to 4)`.
            defer_epilogue: Return only the event; its `wait()` returns `(recv_x, recv_topk_idx,
                recv_topk_weights, handle)`. Needs `async_with_compute_stream`.

        Returns:
            `(recv_x, recv_topk_idx, recv_topk_weights, handle, event)`, of n rows:

            recv_x: `[n, H]`, or a tuple with its scales `[n, P]`, dtypes as sent.
            recv_topk_idx: `[n, K]`, dtype of `topk_idx`: local expert, -1 if on another rank. None
                if expanded.
            recv_topk_weights: `[n, K]` float32, all lanes as sent; expanded: `[n]`. None if none
                were given.
            handle: For combine and cached dispatches; with `handle` that very object.
            event: `event.event` is None for a synchronous call: results are ready.

        Raises:
            TypeError: An argument has the wrong type.
            ContractError: An argument breaks its rule. The other ranks' call then raises
                RuntimeError with the same text, and the buffer stays usable. Likewise TypeError.
            TimeoutError: A rank did not make this call in time; the buffer takes no more calls.
            RuntimeError: The buffer was destroyed, or a rank is gone.
        """
        runtime = self._live_runtime("dispatch")
        glue = load_torch_glue("EPBuffer.dispatch")
        with _refusing(runtime):
            x_sf = None
            if isinstance(x, tuple):
                if len(x) != 2:
                    raise TypeError(
                        f"x must be a tensor or a tuple of tensor and scales, got {len(x)}"
                    )
                x, x_sf = x
            if x is None or isinstance(x, list):
                raise TypeError(
                    f"x must be a tensor or a tuple of tensor and scales, got {type(x).__name__}"
                )
            if handle is not None and not isinstance(handle, EPHandle):
                raise TypeError(f"handle must be an EPHandle or None, got {type(handle).__name__}")
            if do_handle_copy:
                raise ContractError("do_handle_copy must be False: handles are immutable")
            if do_cpu_sync and handle is not None:
                raise ContractError("do_cpu_sync must not be True with a handle: it has the shapes")
            if expert_alignment is not None and expert_alignment < 1:
                raise ContractError(f"expert_alignment must be at least 1, got {expert_alignment}")
            previous = self._check_call(
                num_qps,
                previous_event,
                async_with_compute_stream,
                allocate_on_comm_stream,
                defer_epilogue,
            )
            arguments = dict(
                x=glue.view_of("x", x),
                x_sf=glue.view_of("x[1], the scales,", x_sf),
                topk_idx=glue.view_of("topk_idx", topk_idx),
                topk_weights=glue.view_of("topk_weights", topk_weights),
                cumulative_local_expert_recv_stats=glue.view_of(
                    "cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats
                ),
                num_experts=_to_int("num_experts", num_experts),
                num_max_tokens_per_rank=_to_int("num_max_tokens_per_rank", num_max_tokens_per_rank),
                expert_alignment=_to_int("expert_alignment", expert_alignment),
                num_sms=_to_int("num_sms", num_sms),
                handle=None if handle is None else handle._core,
                do_cpu_sync=handle is None if do_cpu_sync is None else bool(do_cpu_sync),
                do_expand=bool(do_expand),
                do_zero_padding=bool(do_zero_padding),
                use_tma_aligned_col_major_sf=bool(use_tma_aligned_col_major_sf),
                is_async=bool(async_with_compute_stream),
                previous_event=previous,
                stream=self._current_stream(),
                keep_alive=(x, x_sf, topk_idx, topk_weights, cumulative_local_expert_recv_stats)
                if async_with_compute_stream
                else None,
            )
        pending = runtime.dispatch(**arguments)

        def finish() -> tuple[Input, torch.Tensor | None, torch.Tensor | None, EPHandle]:
            recv_x, recv_x_sf, recv_topk_idx, recv_topk_weights, core_handle = pending.outputs()
            recv = glue.to_torch(recv_x)
            return (
                recv if recv_x_sf is None else (recv, glue.to_torch(recv_x_sf)),
                glue.to_torch(recv_topk_idx),
                glue.to_torch(recv_topk_weights),
                EPHandle(core_handle, topk_idx) if handle is None else handle,
            )

        if defer_epilogue:
            return self._deferred(pending, finish)
        return (*finish(), self._event_after(pending, async_with_compute_stream))

    @outside_graphs
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap] | EventOverlap:
        """Brings the experts' outputs back to their tokens' ranks and sums them. Collective.

        Sums run in float32 in a fixed order, bias first, then experts by lane, and are rounded to
        bfloat16. Router weights are not applied.

        Args:
            x: `[n, H]` bfloat16, contiguous, one row for each row of the dispatch; rows beyond the
                received ones and padding are never read. Read in place if on memory of `empty`.
            handle: Of the dispatch, or of any dispatch before.
            topk_weights: Compact `[n, K]`, expanded `[n]` float32, contiguous; optional. Each value
                travels to its token's lane, e.g. as the gradient of a router weight.
            bias: `[T, H]` bfloat16, contiguous, added to the sums; or a tuple of two; optional.
            num_sms: The most SMs; 0: the handle's. No effect on CPU ranks.
            num_qps: No effect: queue pairs, at most `num_allocated_qps`; 0: automatic.
            previous_event: Start after this event; needs `allocate_on_comm_stream`.
            async_with_compute_stream: Return before the exchange is over; results are valid once
                the event has been waited for, and inputs must not change before.
            allocate_on_comm_stream: No effect: results lie in the buffer's memory.
            defer_epilogue: Return only the event; its `wait()` reads the bias, sums, and returns
                `(combined_x, combined_topk_weights)`. Needs `async_with_compute_stream`.

        Returns:
            `(combined_x, combined_topk_weights, event)`:

            combined_x: `[T, H]` bfloat16; without expert and bias 0.
            combined_topk_weights: `[T, K]` float32, 0 for lanes without expert. None if none were
                given.
            event: `event.event` is None for a synchronous call: results are ready.

        Raises:
            TypeError: An argument has the wrong type.
            ContractError: An argument breaks its rule. The other ranks' call then raises
                RuntimeError with the same text, and the buffer stays usable. Likewise TypeError.
            TimeoutError: A rank did not make this call in time; the buffer takes no more calls.
            RuntimeError: The buffer was destroyed, or a rank is gone.
        """
        runtime = self._live_runtime("combine")
        glue = load_torch_glue("EPBuffer.combine")
        with _refusing(runtime):
            if x is None:
                raise TypeError("x must be a torch.Tensor, got None")
            if not isinstance(handle, EPHandle):
                raise TypeError(f"handle must be an EPHandle, got {type(handle).__name__}")
            biases = bias if isinstance(bias, tuple) else (bias, None)
            if len(biases) != 2:
                raise TypeError(f"bias must be None, a tensor or a tuple of 2, got {len(biases)}")
            previous = self._check_call(
                num_qps,
                previous_event,
                async_with_compute_stream,
                allocate_on_comm_stream,
                defer_epilogue,
            )
            arguments = dict(
                x=glue.view_of("x", x),
                handle=handle._core,
                topk_weights=glue.view_of("topk_weights", topk_weights),
                bias_0=glue.view_of("bias", biases[0]),
                bias_1=glue.view_of("bias", biases[1]),
                num_sms=_to_int("num_sms", num_sms),
                is_async=bool(async_with_compute_stream),
                defer_epilogue=bool(defer_epilogue),
                previous_event=previous,
                stream=self._current_stream(),
                keep_alive=(x, topk_weights, *biases) if async_with_compute_stream else None,
            )
        pending = runtime.combine(**arguments)

        def finish() -> tuple[torch.Tensor, torch.Tensor | None]:
            combined_x, combined_topk_weights = pending.outputs(self._current_stream())
            return glue.to_torch(combined_x), glue.to_torch(combined_topk_weights)

        if defer_epilogue:
            return self._deferred(pending, finish)
        return (*finish(), self._event_after(pending, async_with_compute_stream))

    def destroy(self) -> None:
        """Ends the use of the buffer on this rank, after the calls made so far.

        Waits for no other rank, so it may come before or after the end of the process group; ranks
        that still call the buffer get RuntimeError. Results stay valid. May be called again, and
        without `explicitly_destroy` too.
        """
        runtime, self.runtime, self.context = self.runtime, None, None
        if runtime is not None and self._pid == os.getpid():
            runtime.destroy()

    def __del__(self) -> None:
        if self.explicitly_destroy and self.runtime is not None and self._pid == os.getpid():
            warnings.warn(
                "an EPBuffer made with explicitly_destroy=True was dropped without destroy()",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def _live_runtime(self, operation: str) -> _core.EPBuffer:
        if self.runtime is None:
            raise RuntimeError(f"EPBuffer.{operation}: the buffer was destroyed")
        return self.runtime

    def _current_stream(self) -> int:
        """The current stream of this rank's GPU, as C++ takes it."""
        if self.device_idx == CPU:
            return 0
        return load_torch_glue("a buffer on a GPU").current_stream(self.device_idx)

    def _event_after(
        self, pending: _core.PendingDispatch | _core.PendingCombine, is_async: bool
    ) -> EventOverlap:
        return EventOverlap(EventHandle.of(pending.event(), self.device_idx) if is_async else None)

    def _deferred(
        self,
        pending: _core.PendingDispatch | _core.PendingCombine,
        finish: Callable[[], tuple[Any, ...]],
    ) -> EventOverlap:
        def finish_and_wait() -> tuple[Any, ...]:
            results = finish()
            EventHandle.of(pending.event(), self.device_idx).current_stream_wait()
            return results

        event = self._event_after(pending, is_async=True)
        event.register_hook_after_wait(finish_and_wait)
        return event

    def _check_call(
        self,
        num_qps: int,
        previous_event: EventHandle | EventOverlap | None,
        is_async: bool,
        allocate_on_comm_stream: bool,
        defer_epilogue: bool,
    ) -> _core.Event | None:
        """The rules that dispatch and combine share; returns the event to start after."""
        previous = core_event_of("previous_event", previous_event)
        if previous is not None and not allocate_on_comm_stream:
            raise ContractError("previous_event needs allocate_on_comm_stream=True")
        if defer_epilogue and not is_async:
            raise ContractError("defer_epilogue needs async_with_compute_stream=True")
        if not 0 <= num_qps <= self.num_allocated_qps:
            raise ContractError(
                f"allocated QPs are not enough: num_qps must be 0 to {self.num_allocated_qps}, "
                f"got {num_qps}"
            )
        return previous


@contextmanager
def _refusing(runtime: _core.EPBuffer) -> Iterator[None]:
    """Tells the other ranks when this one finds that its arguments can't be right."""
    try:
        yield
    except (TypeError, ValueError) as error:
        runtime.refuse_call(str(error))
        raise


def _to_int(name: str, value: int | None) -> int:
    """`value` for C++, where 0 means that none was given."""
    if value is None:
        return 0
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}") from None


def _require_uniform(bootstrap: _core.Bootstrap, **settings: int) -> None:
    """Raises a ContractError on all ranks if a setting differs between them. Collective."""
    messages = bootstrap.all_gather(repr(sorted(settings.items())).encode())
    if all(message == messages[0] for message in messages):
        return
    from ast import literal_eval

    of_ranks = [dict(literal_eval(message.decode())) for message in messages]
    differing = []
    for name in settings:
        values = [of_rank[name] for of_rank in of_ranks]
        if len(set(values)) > 1:
            places = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            differing.append(f"{name} is {places}")
    raise ContractError(f"settings must be equal on all ranks: {'; '.join(differing)}")
