"""The same exchange written with torch.distributed: what a program without this library would do.

Rows are gathered in the order of their destination, sent by one all-to-all, and their metadata by
another. Sums use embedding_bag, torch's only single-pass sum of scattered BF16 rows (FP32 inside).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class PeerRouting:
    """Where the tokens of one dispatch go and what arrives.

    Attributes:
        sent_tokens: `[num_sent]` int64, tokens by destination.
        send_counts: rows for each rank.
        recv_counts: rows from each rank.
        recv_topk_idx: `[num_recv, K]` int64, local experts or -1.
        recv_topk_weights: `[num_recv, K]` float32.
        sent_row_order: `[num_sent]` int64, sent rows by token, as combine adds them.
        sent_row_starts: `[num_tokens + 1]` int64, bounds of each token in sent_row_order.
    """

    sent_tokens: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    recv_topk_idx: Tensor
    recv_topk_weights: Tensor
    sent_row_order: Tensor
    sent_row_starts: Tensor


@dataclass(frozen=True)
class PeerExpansion:
    """The rows of received tokens by local expert.

    Attributes:
        token_of_row: `[num_rows]` int64.
        weights: `[num_rows]` float32.
        row_order: `[num_rows]` int64, rows by token.
        row_starts: `[num_recv + 1]` int64, bounds of each token in row_order.
    """

    token_of_row: Tensor
    weights: Tensor
    row_order: Tensor
    row_starts: Tensor


def route(topk_idx: Tensor, topk_weights: Tensor, num_experts: int, num_ranks: int) -> PeerRouting:
    """Exchanges counts, then the experts and weights of the tokens that each rank receives."""
    num_tokens = len(topk_idx)
    goes_to = torch.zeros(num_tokens, num_ranks, dtype=torch.bool)
    goes_to.scatter_(1, topk_idx // (num_experts // num_ranks), True)
    destinations, sent_tokens = goes_to.T.nonzero(as_tuple=True)
    send_counts = destinations.bincount(minlength=num_ranks)
    recv_counts = torch.empty_like(send_counts)
    dist.all_to_all_single(recv_counts, send_counts)
    sends, recvs = send_counts.tolist(), recv_counts.tolist()

    metadata = torch.cat([topk_idx.int(), topk_weights.view(torch.int32)], 1)[sent_tokens]
    received = _all_to_all(metadata, sends, recvs)
    recv_experts, recv_weights = received.chunk(2, 1)
    num_local = num_experts // num_ranks
    local = recv_experts.long() - dist.get_rank() * num_local
    starts = torch.zeros(num_tokens + 1, dtype=torch.int64)
    starts[1:] = goes_to.sum(1).cumsum(0)
    return PeerRouting(
        sent_tokens,
        sends,
        recvs,
        local.masked_fill((local < 0) | (local >= num_local), -1),
        recv_weights.contiguous().view(torch.float32),
        sent_tokens.argsort(stable=True),
        starts,
    )


def expand(routing: PeerRouting) -> PeerExpansion:
    """Sorts what arrived by local expert, then by token."""
    tokens, lanes = (routing.recv_topk_idx >= 0).nonzero(as_tuple=True)
    by_expert = routing.recv_topk_idx[tokens, lanes].argsort(stable=True)
    row_order = torch.empty_like(by_expert)
    row_order[by_expert] = torch.arange(len(by_expert))
    starts = torch.zeros(len(routing.recv_topk_idx) + 1, dtype=torch.int64)
    starts[1:] = tokens.bincount(minlength=len(routing.recv_topk_idx)).cumsum(0)
    weights = routing.recv_topk_weights[tokens, lanes][by_expert]
    return PeerExpansion(tokens[by_expert], weights, row_order, starts)


def send_rows(x: Tensor, routing: PeerRouting) -> Tensor:
    """Dispatch of one tensor: its rows on the ranks of their experts, by source rank and token."""
    rows = x.view(torch.uint8).index_select(0, routing.sent_tokens)
    received = _all_to_all(rows, routing.send_counts, routing.recv_counts)
    return received.view(x.dtype)


def expand_rows(rows: Tensor, expansion: PeerExpansion) -> Tensor:
    """One row a (received token, local expert)."""
    expanded = rows.view(torch.uint8).index_select(0, expansion.token_of_row)
    return expanded.view(rows.dtype)


def reduce_rows(rows: Tensor, expansion: PeerExpansion) -> Tensor:
    """The sum of the expert outputs of each received token."""
    return _sum_rows(rows, expansion.row_order, expansion.row_starts)


def return_rows(rows: Tensor, routing: PeerRouting) -> Tensor:
    """Combine: sends rows back to where their tokens came from and adds them there."""
    received = _all_to_all(rows.view(torch.uint8), routing.recv_counts, routing.send_counts)
    return _sum_rows(received.view(rows.dtype), routing.sent_row_order, routing.sent_row_starts)


def _all_to_all(rows: Tensor, send_counts: list[int], recv_counts: list[int]) -> Tensor:
    received = rows.new_empty(sum(recv_counts), *rows.shape[1:])
    dist.all_to_all_single(received, rows, recv_counts, send_counts)
    return received


def _sum_rows(rows: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return functional.embedding_bag(order, rows, starts, mode="sum", include_last_offset=True)
