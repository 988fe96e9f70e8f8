"""One dispatch and combine of V1 on one rank, every output compared with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import legacy_oracle as oracle
import problem as problems
from deep_ep import Buffer
from exchange import check_same, put, put_tokens
from oracle import Tokens
from problem import Problem
from ranks import Rank


def make_buffer(rank: Rank, **options: object) -> Buffer:
    return Buffer(rank.group, 1 << 20, explicitly_destroy=True, **options)


def arguments_of(buffer: Buffer, tokens: Tokens, num_experts: int) -> dict[str, Any]:
    """Keyword arguments of a dispatch without a handle."""
    tokens = put_tokens(tokens)
    per_rank, per_domain, per_expert, in_rank, _ = buffer.get_dispatch_layout(
        tokens.topk_idx, num_experts
    )
    return {
        "x": tokens.x if tokens.x_sf is None else (tokens.x, tokens.x_sf),
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_domain,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": tokens.topk_idx,
        "topk_weights": tokens.topk_weights,
    }


def check_layout(buffer: Buffer, rank: Rank, problem: Problem) -> None:
    tokens = put_tokens(problems.tokens_of(problem)[rank.index])
    expected = oracle.layout(tokens.topk_idx, problem.num_experts, rank.size, rank.num_domains)
    per_rank, per_domain, per_expert, in_rank, event = buffer.get_dispatch_layout(
        tokens.topk_idx, problem.num_experts
    )
    assert event.event is None
    for counts, values in ((per_rank, expected.per_rank), (per_expert, expected.per_expert)):
        assert counts.dtype == torch.int32
        assert counts.tolist() == values
    if rank.num_domains == 1:
        assert per_domain is None
    else:
        assert per_domain.dtype == torch.int32
        assert per_domain.tolist() == expected.per_domain
    assert in_rank.dtype == torch.bool
    assert in_rank.shape == (len(tokens.x), rank.size)
    assert in_rank.tolist() == expected.is_token_in_rank


def check_dispatch(
    buffer: Buffer, rank: Rank, problem: Problem, **options: object
) -> tuple[torch.Tensor, ...]:
    """Dispatches and compares everything; returns the handle."""
    tokens = problems.tokens_of(problem)
    arguments = arguments_of(buffer, tokens[rank.index], problem.num_experts)
    results = buffer.dispatch(**arguments | options)
    results[-1].current_stream_wait()
    recv_x, recv_topk_idx, recv_topk_weights, counts, handle, _ = results
    expected = oracle.dispatch(tokens, problem.num_experts, rank.index)
    check_rows(recv_x, expected, rank)
    check_same("recv_topk_idx", recv_topk_idx, expected.topk_idx, rank.index)
    check_same("recv_topk_weights", recv_topk_weights, expected.topk_weights, rank.index)
    alignment = options.get("expert_alignment", 1)
    assert counts == [-(-count // alignment) * alignment for count in expected.counts]
    check_handle(handle, expected, rank)
    return handle


def check_rows(
    recv_x: Tensor | tuple[Tensor, Tensor], expected: oracle.Received, rank: Rank
) -> None:
    recv_x, recv_sf = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    assert recv_x.is_contiguous()
    check_same("recv_x", recv_x, expected.x, rank.index)
    if expected.x_sf is None:
        assert recv_sf is None
    else:
        assert recv_sf.is_contiguous()
        check_same("recv_x scales", recv_sf, expected.x_sf, rank.index)


def check_handle(handle: tuple[torch.Tensor, ...], expected: oracle.Received, rank: Rank) -> None:
    assert type(handle) is tuple
    assert all(isinstance(part, torch.Tensor) for part in handle)
    sources = [token for _, token in expected.places]
    if rank.num_domains == 1:
        assert len(handle) == 6
        assert handle[0].dtype == torch.int32
        assert handle[0].shape == (rank.size, rank.size)
        assert handle[0][:, rank.index].tolist() == expected.psum
        assert handle[3].tolist() == sources
    else:
        assert len(handle) == 10
        ranks_per_domain = rank.size // rank.num_domains
        assert handle[6].tolist() == expected.psum
        assert handle[4].tolist() == expected.psum[ranks_per_domain - 1 :: ranks_per_domain]
        domains = [source // ranks_per_domain for source, _ in expected.places]
        meta = handle[7].cpu().view(torch.int32)
        assert meta.tolist() == [list(pair) for pair in zip(domains, sources, strict=True)]


def check_combine(
    buffer: Buffer,
    rank: Rank,
    problem: Problem,
    handle: Sequence[Tensor],
    num_bias: int = 0,
    with_weights: bool = True,
    num_rows: int = 0,
    **options: object,
) -> None:
    """Combines made-up rows and weights, `num_rows` of them at least."""
    tokens = problems.tokens_of(problem)
    received = [oracle.dispatch(tokens, problem.num_experts, r) for r in range(rank.size)]
    outputs = [problems.expert_outputs(problem, r, len(got.x)) for r, got in enumerate(received)]
    weights = [
        torch.randn(got.topk_weights.shape, generator=problems.generator(problem.seed, r, 5))
        for r, got in enumerate(received)
    ]
    bias = problems.make_bias(problem, rank.index, num_bias)
    combined, combined_weights, event = buffer.combine(
        put(grown(outputs[rank.index], num_rows)),
        handle,
        topk_weights=put(grown(weights[rank.index], num_rows)) if with_weights else None,
        bias=(None, *map(put, bias[:1]), tuple(map(put, bias)))[num_bias],
        **options,
    )
    event.current_stream_wait()
    shape = (tokens, problem.num_experts, rank.index)
    expected = oracle.combine(*shape, outputs, rank.num_domains, bias)
    check_same("combined_x", combined, expected, rank.index)
    if with_weights:
        expected = oracle.combine_weights(*shape, weights, rank.num_domains)
        check_same("combined_topk_weights", combined_weights, expected, rank.index)
    else:
        assert combined_weights is None


def grown(tensor: Tensor, num_rows: int) -> Tensor:
    """The tensor with rows added that nobody may read: NaN."""
    missing = max(0, num_rows - len(tensor))
    tail = torch.full((missing, *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)
    return torch.cat([tensor, tail])
