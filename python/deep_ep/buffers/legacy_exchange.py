"""The throughput calls of V1 as calls of `EPBuffer`. Letters as in `legacy_throughput`.

V1 adds up the rows of a token rank after rank, `EPBuffer` in the order of lanes: so lanes travel
sorted by expert, and the ids in the order of the caller as if they were scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deep_ep.buffers.legacy_handle import (
    Routing,
    check_handle,
    find_routing,
    make_handle,
    source_ranks,
)
from deep_ep.buffers.legacy_routing import (
    Layout,
    lanes_by_rank,
    localise,
    return_lanes,
    sum_over_ranks,
)
from deep_ep.utils.math import align, ceil_div

if TYPE_CHECKING:
    from deep_ep.buffers.ep import EPBuffer, Input

    Handle = tuple[torch.Tensor, ...]

__all__ = [
    "combine_rows",
    "combine_weights",
    "dispatch_cached",
    "dispatch_lanes",
    "dispatch_rows",
]


def dispatch_lanes(
    ep: EPBuffer,
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    layout: Layout,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_alignment: int,
    num_worst_tokens: int,
    num_sms: int,
) -> tuple[Input, torch.Tensor, torch.Tensor, list[int], Handle]:
    """A dispatch with ids and weights."""
    num_experts, ids = len(layout.num_tokens_per_expert), topk_idx.int()
    if x_sf is not None:
        ids = torch.cat((x_sf.view(torch.int32), ids), dim=1)
    (data, side), _, weights, core, _ = ep.dispatch(
        (x.detach().view(torch.uint8), ids),
        topk_idx.sort(dim=1).values,
        topk_weights,
        num_experts=num_experts,
        num_max_tokens_per_rank=ceil_div(num_worst_tokens, ep.num_ranks) or None,
        expert_alignment=expert_alignment,
        num_sms=num_sms,
        do_cpu_sync=num_worst_tokens == 0,
    )
    routing = Routing(core, num_worst_tokens)
    is_received: torch.Tensor | bool = True
    if num_worst_tokens > 0:
        is_received = (source_ranks(routing, ep.num_ranks) < ep.num_ranks).unsqueeze(1)
        data, side, weights, is_received = (
            tensor[:num_worst_tokens] for tensor in (data, side, weights, is_received)
        )
    num_local, num_sf = num_experts // ep.num_ranks, side.shape[1] - topk_idx.shape[1]
    ids, weights = localise(
        side[:, num_sf:], weights, is_received, ep.rank_idx * num_local, num_local
    )
    recv_x: Input = data.view(x.dtype)
    if x_sf is not None:
        recv_x = recv_x, side[:, :num_sf].contiguous().view(x_sf.dtype)
    handle = make_handle(ep, routing, layout.is_token_in_rank)
    return recv_x, ids.to(topk_idx.dtype), weights, core.num_recv_tokens_per_expert_list, handle


def dispatch_rows(
    ep: EPBuffer,
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    layout: Layout,
    expert_alignment: int,
    num_sms: int,
) -> tuple[Input, None, None, list[int], Handle]:
    """A dispatch without ids: only `is_token_in_rank` says where tokens go."""
    counts = layout.num_tokens_per_expert.view(ep.num_ranks, -1)
    recv_x, _, _, core, _ = ep.dispatch(
        x if x_sf is None else (x, x_sf),
        lanes_by_rank(layout.is_token_in_rank, counts.shape[1]),
        num_experts=counts.numel(),
        num_sms=num_sms,
    )
    # A second exchange: row r of every rank's counts goes to rank r.
    recv_counts = ep.dispatch(
        counts.contiguous().view(torch.uint8),
        torch.arange(ep.num_ranks, device=counts.device).unsqueeze(1),
        num_experts=ep.num_ranks,
    )[0].view(torch.int32)
    aligned = [align(count, expert_alignment) for count in recv_counts.sum(dim=0).tolist()]
    return recv_x, None, None, aligned, make_handle(ep, Routing(core), layout.is_token_in_rank)


def dispatch_cached(
    ep: EPBuffer, x: torch.Tensor, x_sf: torch.Tensor | None, handle: Handle, num_sms: int
) -> tuple[Input, None, None, None, None]:
    """A dispatch that repeats the routing of another."""
    routing = _routing_of(ep, handle)
    recv_x = ep.dispatch(x if x_sf is None else (x, x_sf), handle=routing.core, num_sms=num_sms)[0]
    if routing.num_worst_tokens > 0:
        parts = recv_x if isinstance(recv_x, tuple) else (recv_x,)
        parts = tuple(part[: routing.num_worst_tokens] for part in parts)
        recv_x = parts if isinstance(recv_x, tuple) else parts[0]
    return recv_x, None, None, None, None


def combine_rows(
    ep: EPBuffer,
    x: torch.Tensor,
    handle: Handle,
    bias: tuple[torch.Tensor | None, torch.Tensor | None],
    num_sms: int,
) -> torch.Tensor:
    """The rows of each token from all ranks, added up: `[T, H]`."""
    routing = _routing_of(ep, handle)
    num_rows = routing.core.num_recv_tokens
    if routing.num_worst_tokens == len(x) != num_rows:  # no multiple of R
        grown = ep.empty((num_rows, *x.shape[1:]), x.dtype)
        grown[: len(x)] = x
        x = grown
    return ep.combine(x, routing.core, bias=bias, num_sms=num_sms)[0]


def combine_weights(ep: EPBuffer, weights: torch.Tensor, handle: Handle) -> torch.Tensor:
    """The weights of each token from all ranks, added up in every lane: `[T, K]` float32.

    An exchange of its own: each row goes back to where it came from.
    """
    routing = _routing_of(ep, handle)
    source = source_ranks(routing, ep.num_ranks)[: len(weights)]
    returned = ep.dispatch(
        weights.detach().view(torch.uint8),
        return_lanes(source, ep.num_ranks),
        num_experts=ep.num_ranks,
        num_max_tokens_per_rank=routing.num_worst_tokens or None,
        do_cpu_sync=routing.num_worst_tokens == 0,
    )[0]
    return sum_over_ranks(returned.view(torch.float32), check_handle(handle), ep.num_rdma_ranks)


def _routing_of(ep: EPBuffer, handle: Handle) -> Routing:
    is_token_in_rank = check_handle(handle)

    def rebuild(num_worst_tokens: int) -> Routing:
        core = ep.dispatch(
            is_token_in_rank.new_zeros((len(is_token_in_rank), 2), dtype=torch.uint8),
            lanes_by_rank(is_token_in_rank, 1),
            num_experts=ep.num_ranks,
            num_max_tokens_per_rank=ceil_div(num_worst_tokens, ep.num_ranks) or None,
            do_cpu_sync=num_worst_tokens == 0,
        )[3]
        return Routing(core, num_worst_tokens)

    return find_routing(handle, rebuild)
