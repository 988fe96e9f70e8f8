"""Dispatch and combine against the oracle, bit for bit, on every backend.

Each test is one rank function on N ranks; ids read `ranks4x2_fp8_expand_a8`: 4 ranks in 2 domains.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import exchange as ex
import oracle
import problem as problems
from exchange import Call
from problem import REAL_LARGEST_BATCH, REAL_PROBLEM, Problem
from ranks import Rank, RankPool

GROUPS = [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (6, 3), (8, 1)]  # ranks, domains

# One row of each kind; the property tests mix them.
CALLS = [
    Call(),
    Call(do_expand=True),
    Call(do_expand=True, alignment=8),
    Call(do_expand=True, alignment=128, zero_padding=True, cpu_sync=False),
    Call(alignment=16, cpu_sync=False),
    Call(num_bias=1, multiple_reduction=False),
    Call(do_expand=True, num_bias=2, multiple_reduction=False),
    Call(num_bias=2, mode="async", weights=False),
    Call(do_expand=True, mode="deferred", num_bias=1),
    Call(mode="deferred", cpu_sync=False, lent_outputs=True),
    Call(do_expand=True, alignment=4, mode="async", cpu_sync=False, lent_outputs=True),
    Call(deterministic=True, allow_hybrid_mode=False, num_sms=24),
]


def text_of(value: Problem | Call) -> str:
    """An id made of the fields that differ from their defaults."""
    parts = []
    for field in fields(value):
        this = getattr(value, field.name)
        if this == field.default or field.name in ("num_domains", "seed"):
            continue
        name = field.name.removeprefix("num_").removeprefix("do_")
        if isinstance(value, Problem) and field.name == "num_ranks":
            parts.append(
                f"ranks{this}" + (f"x{value.num_domains}" if value.num_domains > 1 else "")
            )
        elif this is True:
            parts.append(name)
        elif this is False:
            parts.append(f"no_{name}")
        elif isinstance(this, tuple):
            parts.append(f"{name}{'_'.join(map(str, this))}")
        else:
            parts.append(this if isinstance(this, str) else f"{name}{this}")
    return "_".join(parts) or "default"


def shape(num_ranks: int, num_domains: int = 1, **changes: object) -> Problem:
    """Uneven token counts, some ranks without tokens, two experts a rank."""
    counts = (5, 0, 11, 3, 8, 1, 0, 6)[:num_ranks]
    settings = {"tokens": counts, "num_max_tokens": 13, "num_experts": 2 * num_ranks}
    problem = Problem(num_ranks=num_ranks, num_domains=num_domains)
    return replace(problem, **(settings | changes))


@pytest.mark.parametrize("call", CALLS, ids=text_of)
@pytest.mark.parametrize("group", GROUPS, ids=lambda g: f"ranks{g[0]}x{g[1]}")
def test_dispatch_and_combine_agree_with_the_oracle(
    pool: RankPool, backend: str, group: tuple[int, int], call: Call
) -> None:
    problem = shape(*group, routing="masked", num_topk=min(4, 2 * group[0]))
    pool.run(group[0], ex.check_round_trip, problem, call, num_domains=group[1])


@pytest.mark.parametrize("num_topk", [1, 8, 32])
def test_ranks_of_either_kind_agree_with_the_oracle(run: Any, backend: str, num_topk: int) -> None:  # noqa: ANN401
    problem = shape(4, 2, num_topk=num_topk, num_experts=40, hidden=72)
    for call in (Call(num_bias=1), Call(do_expand=True, alignment=4)):
        run(4, ex.check_round_trip, problem, call, num_domains=2)


# --- FP8 ------------------------------------------------------------------------------------------

FP8 = [
    shape(
        ranks, domains, dtype="fp8", sf_dtype=sf_dtype, sf_layout=layout, num_sf=num_sf, hidden=256
    )
    for (ranks, domains), sf_dtype, layout, num_sf in [
        ((2, 1), "fp32", "row", 2),
        ((3, 1), "fp32", "column", 2),
        ((4, 2), "fp32", "tma", 2),
        ((2, 1), "ue8m0", "tma", 1),
        ((4, 2), "ue8m0", "row", 2),
        ((2, 1), "ue8m0", "column", 8),
        ((3, 1), "fp32", "strided", 1),
    ]
]


@pytest.mark.parametrize("tma", [False, True], ids=["row_major", "tma_aligned"])
@pytest.mark.parametrize("problem", FP8, ids=text_of)
def test_fp8_rows_and_scales_arrive_in_every_layout(
    pool: RankPool, backend: str, problem: Problem, tma: bool
) -> None:
    pool.run(
        problem.num_ranks, dispatch_in_all_layouts, problem, tma, num_domains=problem.num_domains
    )


def dispatch_in_all_layouts(rank: Rank, problem: Problem, tma: bool) -> None:
    buffer = ex.make_buffer(rank, problem)
    for call in (
        Call(tma_sf=tma),
        Call(tma_sf=tma, cpu_sync=False),
        Call(tma_sf=tma, do_expand=True, alignment=4, zero_padding=True),
        Call(tma_sf=tma, do_expand=True, alignment=2, zero_padding=True, mode="deferred"),
    ):
        ex.check_dispatch(buffer, rank, problem, call)
    buffer.destroy()


# --- shapes ---------------------------------------------------------------------------------------

SHAPES = [
    shape(4, tokens=0),
    shape(4, tokens=(9, 0, 0, 0), routing="last"),
    shape(4, tokens=6, routing="none"),
    shape(4, tokens=7, routing="hot"),
    shape(3, num_experts=3, num_topk=2),
    shape(3, num_experts=21, num_topk=5, routing="duplicates"),
    shape(4, 2, num_experts=4, num_topk=6, routing="duplicates"),
    shape(2, tokens=222, num_max_tokens=0, num_topk=16, num_experts=32, hidden=128),
    shape(2, tokens=(1, 2), num_max_tokens=0, hidden=1),
    shape(2, hidden=8),
    shape(2, hidden=2880, num_topk=8),
    shape(2, dtype="fp8", hidden=24, num_sf=1),
    shape(2, dtype="fp8", hidden=2944, num_sf=23),
]


@pytest.mark.parametrize("do_expand", [False, True], ids=["compact", "expand"])
@pytest.mark.parametrize("problem", SHAPES, ids=text_of)
def test_unusual_shapes_agree_with_the_oracle(
    pool: RankPool, backend: str, problem: Problem, do_expand: bool
) -> None:
    call = Call(do_expand=do_expand, num_bias=1)
    pool.run(problem.num_ranks, ex.check_round_trip, problem, call, num_domains=problem.num_domains)


def test_ids_of_32_bits_give_local_ids_of_32_bits(pool: RankPool, backend: str) -> None:
    pool.run(2, dispatch_small_ids, shape(2, routing="masked"))


def dispatch_small_ids(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank, problem)
    exchange = problems.exchange_of(problem)
    tokens = replace(
        exchange.tokens[rank.index], topk_idx=exchange.tokens[rank.index].topk_idx.int()
    )
    results = ex.call_dispatch(buffer, Call(), **ex.dispatch_arguments(tokens, exchange, Call()))
    expected = oracle.dispatch(exchange, rank.index).topk_idx
    ex.check_same("recv_topk_idx", results[1], expected.int(), rank.index)
    buffer.destroy()


# --- cached handles -------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [(2, 1), (3, 1), (4, 2)], ids=lambda g: f"ranks{g[0]}x{g[1]}")
@pytest.mark.parametrize(
    "call",
    [
        Call(),
        Call(cpu_sync=False),
        Call(do_expand=True, alignment=4),
        Call(do_expand=True, alignment=4, zero_padding=True, cpu_sync=False, mode="async"),
        Call(mode="deferred"),
    ],
    ids=text_of,
)
def test_a_cached_dispatch_repeats_the_routing_for_any_dtype_and_hidden(
    pool: RankPool, backend: str, group: tuple[int, int], call: Call
) -> None:
    pool.run(group[0], dispatch_cached, shape(*group, routing="masked"), call, num_domains=group[1])


def dispatch_cached(rank: Rank, problem: Problem, call: Call) -> None:
    buffer = ex.make_buffer(rank, problem, call)
    first = ex.check_dispatch(buffer, rank, problem, call)
    handle = first[3]
    variants = [
        problem,
        replace(problem, hidden=56, seed=0),
        replace(problem, dtype="fp8", hidden=128, num_sf=1),
        replace(problem, dtype="fp8", hidden=64, sf_dtype="ue8m0", num_sf=2, sf_layout="column"),
    ]
    for variant in variants:
        for weights in (True, False):
            exchange = cached_exchange(problem, variant, weights)
            tokens = exchange.tokens[rank.index]
            results = ex.call_dispatch(
                buffer,
                call,
                x=tokens.x if tokens.x_sf is None else (tokens.x, tokens.x_sf),
                topk_weights=tokens.topk_weights,
                handle=handle,
                do_expand=call.do_expand,
                do_zero_padding=call.zero_padding,
                async_with_compute_stream=call.mode != "sync",
            )
            assert results[3] is handle
            received = oracle.dispatch(
                exchange, rank.index, do_expand=call.do_expand, alignment=call.alignment
            )
            ex.check_dispatched(received, results, rank.index, exchange, call)
    ex.check_combine(buffer, rank, problem, call, handle)
    ex.check_combine(buffer, rank, problem, call, handle, hidden=16)
    buffer.destroy()


def cached_exchange(routed: Problem, variant: Problem, weights: bool) -> oracle.Exchange:
    """The routing of one problem with the rows of another."""
    exchange = problems.exchange_of(routed)
    rows = problems.tokens_of(variant)
    return replace(
        exchange,
        tokens=[
            replace(row, topk_idx=old.topk_idx, topk_weights=row.topk_weights if weights else None)
            for old, row in zip(exchange.tokens, rows, strict=True)
        ],
    )


def test_every_number_of_sms_gives_the_same_bytes(pool: RankPool, backend: str) -> None:
    """C077: including numbers that divide nothing, and more than there is work."""
    problem = shape(2, tokens=40, num_max_tokens=0, hidden=64)
    for num_sms in (1, 2, 3, 5, 7, 20, 21, 24, 132):
        pool.run(2, ex.check_round_trip, problem, Call(num_sms=num_sms, do_expand=True))


def test_received_tokens_are_counted_on_top_of_what_the_statistics_hold(
    pool: RankPool, backend: str
) -> None:
    pool.run(3, count_received, shape(3, routing="duplicates"))


def count_received(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank, problem)
    exchange = problems.exchange_of(problem)
    layout = oracle.layout_of(exchange, rank.index, do_expand=False)
    stats = ex.put(torch.full((exchange.num_local_experts,), 100, dtype=torch.int32))
    arguments = ex.dispatch_arguments(exchange.tokens[rank.index], exchange, Call(alignment=16))
    for times in (1, 2):
        buffer.dispatch(**arguments, cumulative_local_expert_recv_stats=stats)
        assert stats.tolist() == [100 + times * count for count in layout.counts]
    buffer.destroy()


def test_weights_sent_out_and_back_are_the_weights(run: Any, backend: str) -> None:  # noqa: ANN401
    run(4, return_weights, shape(4, 2, routing="masked"), num_domains=2)


def return_weights(rank: Rank, problem: Problem) -> None:
    for multiple in (True, False):
        call = Call(multiple_reduction=multiple)
        buffer = ex.make_buffer(rank, problem, call)
        tokens = problems.tokens_of(problem)[rank.index]
        expected = torch.where(tokens.topk_idx >= 0, tokens.topk_weights, 0.0)
        for do_expand in (False, True)[: 1 + multiple]:
            x, _, weights, handle = ex.check_dispatch(
                buffer, rank, problem, replace(call, do_expand=do_expand)
            )
            _, returned, _ = buffer.combine(x, handle, topk_weights=weights)
            ex.check_same("weights", returned, expected, rank.index)
        buffer.destroy()


# --- real sizes -----------------------------------------------------------------------------------

needs_memory = pytest.mark.skipif(
    os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 8 << 30,
    reason="needs 8 GiB of memory",
)


@needs_memory
def test_a_layer_of_real_size_agrees_with_the_oracle(pool: RankPool, backend: str) -> None:
    call = Call(lent_outputs=True, weights=False)
    pool.run(2, ex.check_round_trip, REAL_PROBLEM, call, timeout=120)


@needs_memory
def test_the_largest_batch_of_fp8_arrives(pool: RankPool, backend: str) -> None:
    problem = replace(REAL_LARGEST_BATCH, dtype="fp8", num_sf=56)
    pool.run(2, dispatch_once, problem, Call(tma_sf=True), timeout=120)


def dispatch_once(rank: Rank, problem: Problem, call: Call) -> None:
    buffer = ex.make_buffer(rank, problem, call)
    ex.check_dispatch(buffer, rank, problem, call)
    buffer.destroy()
