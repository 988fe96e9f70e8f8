"""The low-latency calls of V1, for few tokens. Letters as in `legacy_packed`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deep_ep._core import ContractError
from deep_ep.buffers.ep import EPBuffer, _refusing
from deep_ep.buffers.legacy_low_latency_exchange import (
    Combine,
    Dispatch,
    LowLatencyHandle,
    run,
)
from deep_ep.buffers.legacy_packed import PackedShape
from deep_ep.glue import outside_graphs

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep_ep.buffers.ep import Input
    from deep_ep.utils.event import EventOverlap

    Hook = Callable[[], None]
    Handle = tuple[torch.Tensor, torch.Tensor, int, int, int]

__all__ = ["LowLatencyCalls"]


class LowLatencyCalls:
    """Part of `Buffer`.

    Calls are collective and keep the same order on all ranks; any number of them may be under way,
    and of their results alive. No call waits for a GPU. Errors are those of `ThroughputCalls`.

    Without `async_finish` and `return_recv_hook` the current stream waits. `async_finish`: it does
    not, results are valid after a wait for the event. `return_recv_hook`: the call only sends;
    results have no contents before the hook, which has to be called once, has run.
    """

    _ep: EPBuffer
    enable_shrink: bool
    _combine_memory: torch.Tensor | None = None

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """`num_rdma_bytes` of a buffer for calls of this shape.

        Args:
            num_max_dispatch_tokens_per_rank: M.
            hidden: H in elements.
            num_ranks: R.
            num_experts: E.

        Returns:
            Bytes, a multiple of 128.
        """
        tokens = num_max_dispatch_tokens_per_rank
        rows = num_experts * tokens
        scale_bytes = hidden // 128 * 4
        dispatch_bytes = 16 + max(2 * hidden, hidden + scale_bytes)
        combine_bytes = 2 * hidden + scale_bytes
        send = max(tokens * dispatch_bytes, rows * combine_bytes)
        receive = rows * max(dispatch_bytes, combine_bytes)
        signals = (4 * num_experts + 127) // 128 * 128
        return (2 * (send + receive + signals) + 128) // 128 * 128

    @outside_graphs
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Input, torch.Tensor, Handle, EventOverlap, Hook | None]:
        """Sends each token to each of its experts. Collective.

        Args:
            x: `[T, H]` bfloat16, contiguous.
            topk_idx: `[T, K]` int64 or int32; negative: no expert. An expert that a token has twice
                gets it once.
            num_max_dispatch_tokens_per_rank: M, equal on all ranks.
            num_experts: E, a multiple of R.
            cumulative_local_expert_recv_stats: `[L]` int32, grows by the rows that each local
                expert receives; optional.
            dispatch_wait_recv_cost_stats: int64; no effect: waits are not measured.
            use_fp8: Quantise, see `legacy_packed.quantise`; H is then a multiple of 128.
            round_scale: Factors are powers of two.
            use_ue8m0: Give their exponents; needs `round_scale` and H a multiple of 512.
            async_finish: See the class, as for `return_recv_hook`; not both.

        Returns:
            `(recv_x, recv_count, handle, event, hook)`:

            recv_x: `[L, R * M, H]` bfloat16, or float8_e4m3fn in a tuple with its factors `[L,
                R * M, H / 128]` float32 or `[L, R * M, H / 512]` int32, column-major in the last
                two dimensions. Rows of an expert are ordered by source rank, then token; those past
                the count are unspecified.
            recv_count: `[L]` int32.
            handle: `(src_info, layout_range, M, H, E)`: the token of each row on its rank, `[L,
                R * M]` int32, and where each rank's rows are, `[L, R]` int64: begin << 32 | count.
            event: `event.event` is None unless `async_finish`.
            hook: None unless `return_recv_hook`.
        """
        ep, max_tokens = self._ep, num_max_dispatch_tokens_per_rank
        stats = cumulative_local_expert_recv_stats
        with _refusing(ep._live_runtime("low_latency_dispatch")):
            _check_modes(async_finish, return_recv_hook)
            _require("x", x, torch.bfloat16, (len(x), x.shape[-1]))
            shape = _shape_of(ep, topk_idx, max_tokens, num_experts)
            if len(x) != len(topk_idx) or len(x) > max_tokens:
                raise ContractError(
                    f"x and topk_idx must have equally many tokens, at most {max_tokens}, "
                    f"got {len(x)} and {len(topk_idx)}"
                )
            if use_fp8 and use_ue8m0 and not round_scale:
                raise ContractError("use_ue8m0 needs round_scale")
            if use_fp8 and x.shape[1] % (512 if use_ue8m0 else 128) != 0:
                raise ContractError(
                    f"for FP8 the hidden size must be a multiple of 128, with UE8M0 of 512, "
                    f"got {x.shape[1]}"
                )
            if stats is not None:
                _require("statistics", stats, torch.int32, (shape.num_local_experts,))

        def make() -> Dispatch:
            return Dispatch(ep, shape, x, topk_idx, use_fp8, round_scale, use_ue8m0, stats)

        inputs = (x, topk_idx, stats)
        results, event, hook = run(ep, make, inputs, async_finish, return_recv_hook)
        return (*results, event, hook)

    @outside_graphs
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Brings the experts' rows back to their tokens and adds them up, weighted. Collective.

        Lanes add up in ascending order, in float32: `sum += row * weight`, rounded at each step,
        and to bfloat16 at the end.

        Args:
            x: `[L, R * M, H]` bfloat16, contiguous, rows where dispatch put them.
            topk_idx: `[T, K]`, as dispatched.
            topk_weights: `[T, K]` float32.
            handle: Of the dispatch, or of any dispatch before.
            use_logfmt: No effect: rows travel as they are.
            zero_copy: Take the rows from `get_next_low_latency_combine_buffer` instead of x.
            async_finish: See the class, as for `return_recv_hook`; not both.
            out: `[T, H]` bfloat16, contiguous, receives the result and is what is returned.
            combine_wait_recv_cost_stats: No effect: waits are not measured.

        Returns:
            `(combined_x, event, hook)`, combined_x `[T, H]` bfloat16, 0 for tokens without expert;
            the others as in `low_latency_dispatch`.
        """
        ep = self._ep
        with _refusing(ep._live_runtime("low_latency_combine")):
            _check_modes(async_finish, return_recv_hook)
            if not isinstance(handle, tuple) or len(handle) != 5:
                raise TypeError("handle must be the tuple of a low-latency dispatch")
            if isinstance(handle, LowLatencyHandle) and not handle.is_received(topk_idx):
                raise ContractError(
                    "topk_idx must be as dispatched, and the hook of the dispatch must have run"
                )
            _, _, max_tokens, hidden, num_experts = handle
            shape = _shape_of(ep, topk_idx, max_tokens, num_experts)
            rows = (shape.num_local_experts, shape.rows_per_expert, hidden)
            _require("x", x, torch.bfloat16, rows)
            _require("topk_weights", topk_weights, torch.float32, tuple(topk_idx.shape))
            if out is not None:
                _require("out", out, torch.bfloat16, (len(topk_idx), hidden))
            if zero_copy and use_logfmt:
                raise ContractError("zero_copy does not go with use_logfmt")
            if zero_copy and (self._combine_memory is None or self._combine_memory.shape != rows):
                raise ContractError("zero_copy needs get_next_low_latency_combine_buffer before")
        source = self._combine_memory if zero_copy else x

        def make() -> Combine:
            return Combine(ep, shape, source, topk_idx, topk_weights, handle, out)

        inputs = (source, topk_idx, topk_weights, out)
        results, event, hook = run(ep, make, inputs, async_finish, return_recv_hook)
        return (*results, event, hook)

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """`[L, R * M, H]` bfloat16 that the next combine with `zero_copy` reads. Local.

        Args:
            handle: Of the dispatch.
        """
        _, _, max_tokens, hidden, num_experts = handle
        num_ranks = self._ep.num_ranks
        shape = (num_experts // num_ranks, num_ranks * max_tokens, hidden)
        if self._combine_memory is None or self._combine_memory.shape != shape:
            self._combine_memory = self._ep.empty(shape, torch.bfloat16)
        return self._combine_memory

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Waits for all ranks; nothing has to be cleaned between calls of any kind. Collective."""
        self._ep.barrier()

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Takes a rank out of low-latency calls, or in again. Local.

        Raises:
            NotImplementedError: `mask` is True: all ranks take part in every call.
            ContractError: The buffer was made without `enable_shrink`, or there is no such rank.
        """
        self._require_shrink()
        if not 0 <= rank_to_mask < self._ep.num_ranks:
            raise ContractError(
                f"the rank must be 0 to {self._ep.num_ranks - 1}, got {rank_to_mask}"
            )
        if mask:
            raise NotImplementedError("a rank can't be masked: all take part in every call")

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes 1 for each masked rank, 0 for the others, into `[R]` int32. Local."""
        self._require_shrink()
        _require("mask_status", mask_status, torch.int32, (self._ep.num_ranks,))
        mask_status.zero_()

    def low_latency_clean_mask_buffer(self) -> None:
        """Takes all ranks in again. Local."""
        self._require_shrink()

    def _require_shrink(self) -> None:
        if not self.enable_shrink:
            raise ContractError("masks need a buffer made with enable_shrink=True")


def _check_modes(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise ContractError("async_finish and return_recv_hook exclude each other")


def _shape_of(
    ep: EPBuffer, topk_idx: torch.Tensor, max_tokens: int, num_experts: int
) -> PackedShape:
    if num_experts <= 0 or num_experts % ep.num_ranks != 0:
        raise ContractError(
            f"num_experts must be a positive multiple of the {ep.num_ranks} ranks, "
            f"got {num_experts}"
        )
    if topk_idx.dim() != 2 or topk_idx.shape[1] == 0:
        raise ContractError(f"topk_idx must be [num_tokens, num_topk], got {list(topk_idx.shape)}")
    return PackedShape(ep.num_ranks, num_experts // ep.num_ranks, max_tokens, topk_idx.shape[1])


def _require(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ContractError(
            f"{name} must be {list(shape)} {dtype}, contiguous, "
            f"got {list(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}"
        )
