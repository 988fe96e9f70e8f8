"""Index computations of V1's throughput calls, on the device of their inputs.

Letters: R ranks, E experts, L = E / R experts of a rank, T tokens of this rank, K top-k, n received
rows. Expert e lives on rank e // L.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_ep._core import ContractError

__all__ = [
    "MAX_LANES",
    "Layout",
    "layout_of",
    "lanes_by_rank",
    "localise",
    "return_lanes",
    "sum_over_ranks",
]

MAX_LANES = 32
"""The most lanes of a token in `EPBuffer`."""


@dataclass
class Layout:
    """Where the tokens of this rank go.

    Attributes:
        num_tokens_per_rank: `[R]` int32.
        num_tokens_per_rdma_rank: `[domains]` int32; None in one domain.
        num_tokens_per_expert: `[E]` int32: each lane counts.
        is_token_in_rank: `[T, R]` bool.
    """

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_rdma_rank: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor


def layout_of(topk_idx: torch.Tensor, num_experts: int, num_ranks: int, num_domains: int) -> Layout:
    """Counts the selections of `topk_idx`, `[T, K]`; ids outside 0 .. E - 1 select nothing.

    Raises:
        TypeError, ContractError: The ids are no matrix of integers, or R does not divide E, or an
            id on the CPU is too large.
    """
    if not isinstance(topk_idx, torch.Tensor):
        raise TypeError(f"topk_idx must be a torch.Tensor, got {type(topk_idx).__name__}")
    if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int64, torch.int32):
        raise ContractError(
            f"topk_idx must be [num_tokens, num_topk] int64 or int32, "
            f"got {list(topk_idx.shape)} {topk_idx.dtype}"
        )
    if num_experts <= 0 or num_experts % num_ranks != 0:
        raise ContractError(
            f"num_experts must be a positive multiple of the {num_ranks} ranks, got {num_experts}"
        )
    if topk_idx.is_cpu and topk_idx.numel() and int(topk_idx.max()) >= num_experts:
        raise ContractError(
            f"topk_idx must be below num_experts {num_experts}, got {int(topk_idx.max())}"
        )
    idx = topk_idx.long()
    idx = torch.where((idx >= 0) & (idx < num_experts), idx, num_experts)
    # One more column, or counter, takes what selects nothing.
    in_rank = idx.new_zeros((len(idx), num_ranks + 1), dtype=torch.bool)
    in_rank = in_rank.scatter_(1, idx // (num_experts // num_ranks), True)[:, :num_ranks]
    lanes = idx.flatten()
    per_expert = lanes.new_zeros(num_experts + 1, dtype=torch.int32)
    per_expert.scatter_add_(0, lanes, torch.ones_like(lanes, dtype=torch.int32))
    per_domain = None
    if num_domains > 1:
        in_domain = in_rank.unflatten(1, (num_domains, -1)).any(dim=2)
        per_domain = in_domain.sum(dim=0, dtype=torch.int32)
    return Layout(
        num_tokens_per_rank=in_rank.sum(dim=0, dtype=torch.int32),
        num_tokens_per_rdma_rank=per_domain,
        num_tokens_per_expert=per_expert[:num_experts],
        is_token_in_rank=in_rank.contiguous(),
    )


def lanes_by_rank(is_token_in_rank: torch.Tensor, num_local_experts: int) -> torch.Tensor:
    """Expert ids that lead where `is_token_in_rank`, `[T, R]`, says; -1 elsewhere.

    `[T, min(R, 32)]` int64, ascending: the first expert of each rank.
    """
    num_ranks = is_token_in_rank.shape[1]
    first = torch.arange(num_ranks, device=is_token_in_rank.device) * num_local_experts
    lanes = torch.where(is_token_in_rank, first, -1)
    if num_ranks <= MAX_LANES:
        return lanes
    return lanes.sort(dim=1).values[:, -MAX_LANES:].contiguous()


def localise(
    ids: torch.Tensor,
    weights: torch.Tensor,
    is_received: torch.Tensor | bool,
    first: int,
    num_local: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank sees of the lanes of its rows: ids from 0 on; -1 and 0 for others' experts.

    Args:
        ids: `[n, K]`, of experts.
        weights: `[n, K]` float32.
        is_received: `[n, 1]` bool: rows that hold a token; True: all.
        first: The first expert of this rank.
        num_local: How many it has.
    """
    local = ids - first
    is_local = (local >= 0) & (local < num_local) & is_received
    return torch.where(is_local, local, -1), torch.where(is_local, weights, 0)


def return_lanes(source: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Lanes `[rows, 1]` that lead each row back to its source; -1 if that is `num_ranks`: none."""
    return torch.where(source < num_ranks, source, -1).unsqueeze(1)


def sum_over_ranks(
    returned: torch.Tensor, is_token_in_rank: torch.Tensor, num_domains: int
) -> torch.Tensor:
    """Sums what the ranks sent back for each token, ranks ascending in a domain, then domains.

    Args:
        returned: `[m, K]` float32, ordered by rank, then token.
        is_token_in_rank: `[T, R]` bool.
        num_domains: Of the ranks.

    Returns:
        `[T, K]` float32.
    """
    num_tokens, num_ranks = is_token_in_rank.shape
    total = returned.new_zeros((num_tokens, returned.shape[1]))
    if len(returned) == 0:
        return total
    by_rank = is_token_in_rank.t()
    rows = (by_rank.flatten().cumsum(0) - 1).clamp_(min=0).view(num_ranks, num_tokens)
    of_domain = torch.zeros_like(total)
    for rank in range(num_ranks):
        term = of_domain + returned[rows[rank]]
        of_domain = torch.where(by_rank[rank].unsqueeze(1), term, of_domain)
        if (rank + 1) % (num_ranks // num_domains) == 0:
            total = total + of_domain
            of_domain = torch.zeros_like(total)
    return total
