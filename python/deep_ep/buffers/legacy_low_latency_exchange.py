"""The low-latency calls of V1 as calls of `EPBuffer`. Letters as in `legacy_packed`.

For `EPBuffer` each lane of a token is a token with one expert: all its rows come back to their
source, which applies the weights. A path of the core that packs, quantises and weighs by itself
would take the place of `Dispatch` and `Combine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deep_ep.buffers.legacy_packed import (
    Packed,
    PackedShape,
    first_lanes,
    quantise,
    rows_in_packed,
    weighted_sum,
)
from deep_ep.buffers.legacy_stream import run_placed
from deep_ep.device import CPU
from deep_ep.glue import outside_graphs
from deep_ep.utils.event import EventOverlap

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep_ep.buffers.ep import EPBuffer, EPHandle

    Hook = Callable[[], None]

__all__ = ["Combine", "Dispatch", "LowLatencyHandle", "run"]


class LowLatencyHandle(tuple):
    """`(src_info, layout_range, M, H, E)`, with the handle of `EPBuffer` once it is received.

    A tuple of the same that a program made itself is taken too, at the price of one more exchange.

    Attributes:
        core: The handle of `EPBuffer`.
        packed_rows: `rows_in_packed` of that.
    """

    core: EPHandle | None = None
    packed_rows: torch.Tensor | None = None

    def is_received(self, topk_idx: torch.Tensor) -> bool:
        """Whether the dispatch is over, and had so many lanes."""
        return self.core is not None and len(self.core.topk_idx) == topk_idx.numel()


class Dispatch:
    """A dispatch; `results` are `(recv_x, recv_count, handle)`, filled by `receive`."""

    def __init__(
        self,
        ep: EPBuffer,
        shape: PackedShape,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
        stats: torch.Tensor | None,
    ) -> None:
        self._ep, self._shape, self._topk_idx, self._stats = ep, shape, topk_idx, stats
        data, sf = x.detach(), None
        if use_fp8:
            data, sf = quantise(data, round_scale, use_ue8m0)
        self._rows = _for_lanes(data, shape.num_topk)
        if sf is not None:
            self._rows = self._rows, _for_lanes(sf, shape.num_topk)
        self._packed = packed = Packed(shape, data, sf)
        self._handle = LowLatencyHandle(
            (
                *(packed.src_info, packed.layout_range, shape.num_max_tokens, x.shape[1]),
                shape.num_experts,
            )
        )
        recv_x = packed.x if sf is None else (packed.x, packed.x_sf)
        self.results = recv_x, packed.count, self._handle

    def send(self, **options: bool) -> tuple | EventOverlap:
        return _dispatch_lanes(self._ep, self._rows, self._topk_idx, self._shape, **options)

    @outside_graphs
    def receive(self, received: tuple) -> None:
        recv_x, _, _, core = received[:4]
        self._handle.packed_rows = self._packed.fill(recv_x, core)
        self._handle.core = core
        if self._stats is not None:
            self._stats.add_(self._packed.count)


class Combine:
    """A combine; `results` are `(combined_x,)`, filled by `receive`."""

    def __init__(
        self,
        ep: EPBuffer,
        shape: PackedShape,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle | tuple,
        out: torch.Tensor | None,
    ) -> None:
        self._ep, self._shape = ep, shape
        self._topk_idx, self._topk_weights = topk_idx, topk_weights.detach()
        if not isinstance(handle, LowLatencyHandle):
            handle = _rebuild(ep, shape, topk_idx)
        self._core = handle.core
        rows = handle.packed_rows.clamp(max=shape.num_rows - 1)
        self._rows = ep.empty((len(rows), x.shape[2]), x.dtype)
        torch.index_select(x.detach().flatten(0, 1), 0, rows, out=self._rows)
        self._out = x.new_empty((len(topk_idx), x.shape[2])) if out is None else out
        self.results = (self._out,)

    def send(self, **options: bool) -> tuple | EventOverlap:
        return self._ep.combine(self._rows, self._core, **options)

    @outside_graphs
    def receive(self, received: tuple) -> None:
        rows = received[0].unflatten(0, tuple(self._topk_idx.shape))
        weighted_sum(rows, self._topk_idx, self._topk_weights, self._shape.num_experts, self._out)


def run(
    ep: EPBuffer,
    make: Callable[[], Dispatch | Combine],
    inputs: tuple,
    is_async: bool,
    return_recv_hook: bool,
) -> tuple[tuple, EventOverlap, Hook | None]:
    """Makes a call in one of V1's three ways: its results, event and hook."""
    if return_recv_hook:
        operation = make()
        sent = operation.send(async_with_compute_stream=True, defer_epilogue=True)
        hook = _once(lambda: operation.receive(sent.wait()))
        return operation.results, EventOverlap(), hook

    def call() -> tuple:
        operation = make()
        operation.receive(operation.send())
        return operation.results

    results, event = run_placed(ep, call, inputs, None, is_async)
    return results, event, None


def _once(function: Hook) -> Hook:
    pending = [function]

    def hook() -> None:
        if pending:
            pending.pop()()

    return hook


def _for_lanes(rows: torch.Tensor, num_topk: int) -> torch.Tensor:
    """A copy of each row for each lane of its token: the caller may overwrite its own."""
    lanes = rows.unsqueeze(1).expand(-1, num_topk, -1)
    return lanes.clone(memory_format=torch.contiguous_format).flatten(0, 1)


def _dispatch_lanes(
    ep: EPBuffer,
    rows: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_idx: torch.Tensor,
    shape: PackedShape,
    **options: bool,
) -> tuple | EventOverlap:
    lanes = torch.arange(shape.num_topk, device=topk_idx.device)
    lanes = torch.where(first_lanes(topk_idx) == lanes, topk_idx, -1)
    return ep.dispatch(
        rows,
        lanes.reshape(-1, 1),
        num_experts=shape.num_experts,
        num_max_tokens_per_rank=shape.num_max_tokens * shape.num_topk,
        # Exact rows cost CPU ranks nothing; a GPU must not be waited for.
        do_cpu_sync=ep.device_idx == CPU,
        do_expand=True,
        **options,
    )


def _rebuild(ep: EPBuffer, shape: PackedShape, topk_idx: torch.Tensor) -> LowLatencyHandle:
    rows = topk_idx.new_zeros((topk_idx.numel(), 2), dtype=torch.uint8)
    recv_x, _, _, core, _ = _dispatch_lanes(ep, rows, topk_idx, shape)
    handle = LowLatencyHandle()
    handle.core, handle.packed_rows = core, rows_in_packed(core, shape, len(recv_x))
    return handle
