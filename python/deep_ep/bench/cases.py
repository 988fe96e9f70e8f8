"""The operations that are measured, each also with torch.distributed, and their ceilings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep import EPBuffer

from . import ceilings, peer
from .ranks import Rank
from .report import Shape

# Channels that share a scale factor.
_SCALE_GROUP = 128

Rows = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One operation, ready to run.

    Attributes:
        run: makes one call of the library.
        run_peer: the same with torch.distributed.
        check: takes what the two returned; raises if they differ.
        num_bytes: that this rank must move.
        ceiling: measures what a rank can move.
        sum8: the same for sums of 8 rows; None for a dispatch.
    """

    run: Callable[[], Any]
    run_peer: Callable[[], Any]
    check: Callable[[Any, Any], None]
    num_bytes: int
    ceiling: Callable[[], float]
    sum8: Callable[[], float] | None = None


def case_names(
    operations: list[str], layouts: list[str], dtypes: list[str]
) -> list[tuple[str, str, str]]:
    """All combinations that exist: combine takes BF16 only."""
    return [
        (operation, layout, dtype)
        for operation in operations
        for dtype in dtypes
        for layout in layouts
        if dtype == "bf16" or "dispatch" in operation
    ]


class Bench:
    """The inputs of one rank, and the cases made from them."""

    def __init__(self, rank: Rank, shape: Shape, buffer: EPBuffer) -> None:
        self._rank, self._shape, self._buffer = rank, shape, buffer
        generator = torch.Generator().manual_seed(rank.idx)
        scores = torch.rand(shape.tokens, shape.experts, generator=generator)
        weights, self._topk_idx = scores.topk(shape.topk)
        self._topk_weights = weights / weights.sum(1, keepdim=True)
        self._x = torch.randn(shape.tokens, shape.hidden, generator=generator).bfloat16()
        self._routing = self._route_peer()

    def make(self, operation: str, layout: str, dtype: str) -> Case:
        """Prepares a case. Collective."""
        if operation == "dispatch":
            return self._dispatch(layout, self._rows(dtype))
        if operation == "cached_dispatch":
            return self._cached_dispatch(layout, self._rows(dtype))
        return self._combine(layout, is_lent=operation == "combine")

    def _rows(self, dtype: str) -> Rows:
        if dtype == "bf16":
            return self._x
        num_groups = -(-self._shape.hidden // _SCALE_GROUP)
        generator = torch.Generator().manual_seed(self._rank.idx)
        scales = torch.rand(self._shape.tokens, num_groups, generator=generator)
        return self._x.to(torch.float8_e4m3fn), scales

    def _route_peer(self) -> peer.PeerRouting:
        return peer.route(
            self._topk_idx, self._topk_weights, self._shape.experts, self._rank.num_ranks
        )

    def _call_dispatch(self, layout: str, rows: Rows) -> tuple[Any, ...]:
        return self._buffer.dispatch(
            rows,
            topk_idx=self._topk_idx,
            topk_weights=self._topk_weights,
            num_experts=self._shape.experts,
            num_sms=self._shape.num_sms,
            do_expand=layout == "expanded",
        )

    def _dispatch(self, layout: str, rows: Rows) -> Case:
        def run_peer() -> tuple[Any, ...]:
            routing = self._route_peer()
            received = _map(lambda tensor: peer.send_rows(tensor, routing), rows)
            if layout == "compact":
                return received, routing.recv_topk_idx, routing.recv_topk_weights
            expansion = peer.expand(routing)
            expanded = _map(lambda tensor: peer.expand_rows(tensor, expansion), received)
            return expanded, None, expansion.weights

        def check(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
            for name, left, right in zip(
                ("rows", "experts", "weights"), ours, theirs, strict=False
            ):
                _require_equal(name, left, right)

        return self._dispatch_case(
            layout, rows, lambda: self._call_dispatch(layout, rows)[:3], run_peer, check
        )

    def _cached_dispatch(self, layout: str, rows: Rows) -> Case:
        handle = self._call_dispatch(layout, rows)[3]
        expansion = peer.expand(self._routing)

        def run() -> Rows:
            is_expanded = layout == "expanded"
            return self._buffer.dispatch(rows, handle=handle, do_expand=is_expanded)[0]

        def run_peer() -> Rows:
            received = _map(lambda tensor: peer.send_rows(tensor, self._routing), rows)
            if layout == "compact":
                return received
            return _map(lambda tensor: peer.expand_rows(tensor, expansion), received)

        return self._dispatch_case(
            layout, rows, run, run_peer, lambda ours, theirs: _require_equal("rows", ours, theirs)
        )

    def _dispatch_case(
        self,
        layout: str,
        rows: Rows,
        run: Callable[[], Any],
        run_peer: Callable[[], Any],
        check: Callable[[Any, Any], None],
    ) -> Case:
        tensors = rows if isinstance(rows, tuple) else (rows,)
        row_bytes = sum(tensor[:1].nbytes for tensor in tensors)
        num_rows = self._num_rows(layout)
        return Case(
            run,
            run_peer,
            check,
            num_rows * row_bytes,
            lambda: ceilings.copy_gbps(num_rows, row_bytes, self._rank.num_threads),
        )

    def _combine(self, layout: str, is_lent: bool) -> Case:
        received, _, _, handle, _ = self._call_dispatch(layout, self._x)
        if is_lent:
            outputs = self._buffer.empty(tuple(received.shape), torch.bfloat16).copy_(received)
        else:
            outputs = received.clone()
        del received
        expansion = peer.expand(self._routing)

        def run_peer() -> Tensor:
            rows = outputs if layout == "compact" else peer.reduce_rows(outputs, expansion)
            return peer.return_rows(rows, self._routing)

        tokens, hidden = self._shape.tokens, self._shape.hidden
        num_rows = self._num_rows(layout)
        # Every rank reads what lies on it; all together read what all tokens sum.
        num_terms = self._shape.topk if layout == "expanded" else self._mean_destinations()

        def sum_ceiling(num_terms: int) -> float:
            return ceilings.sum_gbps(tokens, num_terms, hidden, self._rank.num_threads)

        return Case(
            lambda: self._buffer.combine(outputs, handle, num_sms=self._shape.num_sms)[0],
            run_peer,
            _require_close,
            (num_rows + tokens) * hidden * 2,
            lambda: sum_ceiling(num_terms),
            lambda: sum_ceiling(8),
        )

    def _num_rows(self, layout: str) -> int:
        if layout == "compact":
            return sum(self._routing.recv_counts)
        return int((self._routing.recv_topk_idx >= 0).sum())

    def _mean_destinations(self) -> int:
        totals = torch.tensor([len(self._routing.sent_tokens), self._shape.tokens])
        dist.all_reduce(totals)
        num_sent, num_tokens = totals.tolist()
        return max(1, round(num_sent / max(1, num_tokens)))


def _map(function: Callable[[Tensor], Tensor], rows: Rows) -> Rows:
    if isinstance(rows, tuple):
        return function(rows[0]), function(rows[1])
    return function(rows)


def _require_equal(name: str, ours: Any, theirs: Any) -> None:  # noqa: ANN401
    if isinstance(ours, tuple):
        for left, right in zip(ours, theirs, strict=True):
            _require_equal(name, left, right)
    elif (ours is None) != (theirs is None) or (
        ours is not None and not torch.equal(_bits(ours), _bits(theirs))
    ):
        raise RuntimeError(f"dispatch and torch.distributed received different {name}")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _require_close(ours: Tensor, theirs: Tensor) -> None:
    # The two add in different orders and round to BF16 (8 bits) at most twice.
    if not torch.allclose(ours.float(), theirs.float(), rtol=2**-6, atol=2**-6):
        raise RuntimeError("combine and torch.distributed computed different sums")
