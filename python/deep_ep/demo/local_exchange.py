"""The exchange inside one process: with the roundings of dispatch and combine, and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .model import Layer, Routed, run_experts


class _Routing(NamedTuple):
    """Which row of the expert outputs belongs to which lane of which token.

    Attributes:
        num_ranks: R.
        token_of_row: `[num_rows]`, rows grouped by expert, in the order of the tokens.
        row_of_lane: `[num_tokens, num_topk]`, the inverse.
        rank_of_lane: `[num_tokens, num_topk]`, the rank that holds the lane's expert.
        rank_order: `[num_tokens, num_ranks]`, the ranks by their highest lane of the token.
    """

    num_ranks: int
    token_of_row: Tensor
    row_of_lane: Tensor
    rank_of_lane: Tensor
    rank_order: Tensor


def _make_routing(topk_idx: Tensor, num_experts: int, num_ranks: int) -> _Routing:
    num_topk = topk_idx.shape[1]
    lane_of_row = topk_idx.flatten().argsort(stable=True)
    row_of_lane = torch.empty_like(lane_of_row)
    row_of_lane[lane_of_row] = torch.arange(len(lane_of_row))
    rank_of_lane = topk_idx // (num_experts // num_ranks)
    highest_lane = torch.full((len(topk_idx), num_ranks), -1)
    for lane in range(num_topk):
        highest_lane.scatter_(1, rank_of_lane[:, lane : lane + 1], lane)
    return _Routing(
        num_ranks,
        lane_of_row // num_topk,
        row_of_lane.view_as(topk_idx),
        rank_of_lane,
        highest_lane.argsort(dim=1, stable=True),
    )


def _sum_rows(rows: Tensor, routing: _Routing) -> Tensor:
    """Combine's sum of BF16 rows in FP32: over the lanes of each rank, then over ranks.

    Each of the two sums starts from 0, goes by ascending lane, and is rounded to BF16 at its end.
    """
    num_tokens, num_topk = routing.row_of_lane.shape
    tokens = torch.arange(num_tokens)
    partial = torch.zeros(num_tokens, routing.num_ranks, rows.shape[1])
    for lane in range(num_topk):
        partial[tokens, routing.rank_of_lane[:, lane]] += rows[routing.row_of_lane[:, lane]]
    partial = partial.bfloat16()
    total = torch.zeros(num_tokens, rows.shape[1])
    for rank in routing.rank_order.unbind(1):
        total += partial[tokens, rank]
    return total.bfloat16()


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routing: _Routing) -> Tensor:  # noqa: ANN401
        ctx.routing = routing
        return x[routing.token_of_row]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return _sum_rows(grad, ctx.routing), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, routing: _Routing) -> Tensor:  # noqa: ANN401
        ctx.routing = routing
        return _sum_rows(rows, routing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return grad[ctx.routing.token_of_row], None


class RoundedExchange:
    """Computes bit for bit what dispatch and combine over `num_ranks` ranks must give."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def __call__(self, layer: Layer, shards: Sequence[Routed]) -> list[Tensor]:
        x = torch.cat([shard.x.bfloat16() for shard in shards])
        topk_idx = torch.cat([shard.topk_idx for shard in shards])
        topk_weights = torch.cat([shard.topk_weights for shard in shards])
        routing = _make_routing(topk_idx, len(layer), self._num_ranks)
        rows = _Dispatch.apply(x, routing)
        row_weights = topk_weights.flatten()[topk_idx.flatten().argsort(stable=True)]
        counts = topk_idx.flatten().bincount(minlength=len(layer)).tolist()
        outputs = run_experts(layer, rows, row_weights, counts).bfloat16()
        combined = _Combine.apply(outputs, routing)
        return list(combined.float().split([len(shard.x) for shard in shards]))


def exact_exchange(layer: Layer, shards: Sequence[Routed]) -> list[Tensor]:
    """The textbook mixture of experts in FP32: nothing is rounded, sorted or sent."""
    outputs = []
    for x, topk_idx, topk_weights in shards:
        total = torch.zeros_like(x)
        for idx, expert in enumerate(layer):
            tokens, lanes = (topk_idx == idx).nonzero(as_tuple=True)
            weighted = expert(x[tokens]) * topk_weights[tokens, lanes, None]
            total = total.index_add(0, tokens, weighted)
        outputs.append(total)
    return outputs
