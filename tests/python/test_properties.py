"""Random shapes, routings and call sequences against the oracle, bit for bit; ranks are threads."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import exchange as ex
import oracle
import problem as problems
from exchange import Call
from problem import Problem
from ranks import Rank, run_threads

bounded = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
few = settings(bounded, max_examples=30)

DIRECT = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]  # ranks, domains
HYBRID = [(2, 2), (4, 2), (6, 2), (6, 3)]
GROUPS = st.sampled_from(DIRECT + HYBRID)
ROUTINGS = st.sampled_from(["random", "masked", "duplicates", "hot", "last", "none"])


@st.composite
def problem_strategy(draw: st.DrawFn, groups: list[tuple[int, int]]) -> Problem:
    num_ranks, num_domains = draw(st.sampled_from(groups))
    tokens = tuple(draw(st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks)))
    dtype = draw(st.sampled_from(["bf16", "fp8"]))
    hidden = draw(st.integers(1, 40))
    return Problem(
        num_ranks=num_ranks,
        num_domains=num_domains,
        tokens=tokens,
        num_max_tokens=max(1, *tokens) + draw(st.integers(0, 3)),
        hidden=hidden if dtype == "bf16" else 2 * hidden,
        num_topk=draw(st.integers(1, 9)),
        num_experts=num_ranks * draw(st.integers(1, 5)),
        dtype=dtype,
        num_sf=draw(st.integers(1, 5)),
        sf_dtype=draw(st.sampled_from(["fp32", "ue8m0"])),
        sf_layout=draw(st.sampled_from(["row", "column", "tma", "strided"])),
        routing=draw(ROUTINGS),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def call_strategy(draw: st.DrawFn, problem: Problem) -> Call:
    do_expand = draw(st.booleans())
    repeats = problem.routing in ("duplicates", "last")
    return Call(
        do_expand=do_expand,
        alignment=draw(st.sampled_from([1, 2, 3, 8, 16, 128])),
        zero_padding=do_expand and draw(st.booleans()),
        # The worst case has no room for an expert that is repeated in a row.
        cpu_sync=(do_expand and repeats) or draw(st.booleans()),
        tma_sf=draw(st.booleans()),
        weights=draw(st.booleans()),
        num_bias=draw(st.integers(0, 2)),
        num_sms=draw(st.sampled_from([0, 1, 2, 3, 24])),
        mode=draw(st.sampled_from(["sync", "async", "deferred"])),
        lent_outputs=draw(st.booleans()),
        allow_hybrid_mode=draw(st.integers(0, 3)) > 0,
        multiple_reduction=draw(st.booleans()),
    )


@pytest.mark.parametrize("groups", [DIRECT, HYBRID], ids=["direct", "hybrid"])
@bounded
@given(data=st.data())
def test_any_exchange_agrees_with_the_oracle(
    backend: str, groups: list[tuple[int, int]], data: st.DataObject
) -> None:
    problem = data.draw(problem_strategy(groups))
    call = data.draw(call_strategy(problem))
    run_threads(
        problem.num_ranks, ex.check_round_trip, problem, call, num_domains=problem.num_domains
    )


@dataclass(frozen=True)
class Step:
    """One step of a program over a buffer; `which` picks one of the live handles."""

    kind: str  # dispatch, cached, combine, drop
    which: int
    seed: int
    call: Call


@st.composite
def step_strategy(draw: st.DrawFn, problem: Problem) -> Step:
    return Step(
        kind=draw(st.sampled_from(["dispatch", "cached", "combine", "combine", "drop"])),
        which=draw(st.integers(0, 5)),
        seed=draw(st.integers(0, 3)),
        call=replace(draw(call_strategy(problem)), allow_hybrid_mode=True, multiple_reduction=True),
    )


@few
@given(data=st.data())
def test_handles_may_be_used_in_any_order(backend: str, data: st.DataObject) -> None:
    """C015, C016, C020: other hidden sizes, capacities and routings on one buffer, interleaved."""
    num_ranks, num_domains = data.draw(GROUPS)
    problem = Problem(num_ranks, num_domains, num_experts=2 * num_ranks, routing="masked")
    steps = data.draw(st.lists(step_strategy(problem), min_size=1, max_size=12))
    run_threads(num_ranks, run_steps, problem, tuple(steps), num_domains=num_domains)


def run_steps(rank: Rank, problem: Problem, steps: tuple[Step, ...]) -> None:
    buffer = ex.make_buffer(rank, problem)
    live: list[tuple] = []  # (problem, call, handle)
    kept = []  # outputs, and what they must still be at the end
    for step in steps:
        if step.kind == "dispatch" or not live:
            this = replace(problem, seed=step.seed, hidden=8 << step.seed, tokens=5 + step.seed)
            results = ex.check_dispatch(buffer, rank, this, step.call)
            live.append((this, step.call, results[3]))
            if step.call.cpu_sync and step.call.alignment == 1:
                kept.append((results[0], results[0].clone()))
            continue
        index = step.which % len(live)
        this, call, handle = live[index]
        call = replace(step.call, do_expand=call.do_expand, alignment=call.alignment,
                       cpu_sync=call.cpu_sync, zero_padding=call.zero_padding)  # fmt: skip
        if step.kind == "combine":
            kept.append((ex.check_combine(buffer, rank, this, call, handle)[0],))
            kept[-1] += (kept[-1][0].clone(),)
        elif step.kind == "cached":
            exchange = problems.exchange_of(this)
            tokens = exchange.tokens[rank.index]
            results = ex.call_dispatch(
                buffer,
                call,
                x=tokens.x,
                topk_weights=tokens.topk_weights,
                handle=handle,
                do_expand=call.do_expand,
                do_zero_padding=call.zero_padding,
                async_with_compute_stream=call.mode != "sync",
            )
            received = oracle.dispatch(
                exchange, rank.index, do_expand=call.do_expand, alignment=call.alignment
            )
            ex.check_dispatched(received, results, rank.index, exchange, call)
        else:
            live.pop(index)
            del handle
            gc.collect(0)
    buffer.destroy()
    for number, (now, then) in enumerate(kept):
        ex.check_same(f"kept output {number}", now, then, rank.index)


@few
@given(
    group=GROUPS,
    num_topk=st.integers(1, 8),
    num_local_experts=st.integers(1, 8),
    alignment=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_counts_of_a_handle_agree_with_the_received_ids(
    backend: str,
    group: tuple[int, int],
    num_topk: int,
    num_local_experts: int,
    alignment: int,
    seed: int,
) -> None:
    """C079: aligned and true counts, from the ids that arrived alone."""
    problem = Problem(
        *group,
        num_topk=num_topk,
        num_experts=group[0] * num_local_experts,
        routing="duplicates",
        seed=seed,
    )
    run_threads(group[0], count_received_ids, problem, alignment, num_domains=group[1])


def count_received_ids(rank: Rank, problem: Problem, alignment: int) -> None:
    buffer = ex.make_buffer(rank, problem)
    exchange = problems.exchange_of(problem)
    call = Call(alignment=alignment)
    arguments = ex.dispatch_arguments(exchange.tokens[rank.index], exchange, call)
    _, ids, _, handle, _ = buffer.dispatch(**arguments)
    counts = ids[ids >= 0].bincount(minlength=exchange.num_local_experts)
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts.tolist()
    aligned = [oracle.align(count, alignment) for count in counts.tolist()]
    assert handle.num_recv_tokens_per_expert_list == aligned
    assert handle.num_expanded_tokens == sum(aligned)
    assert handle.psum_num_recv_tokens_per_expert[-1].item() == sum(aligned)
    buffer.destroy()


@few
@given(
    tokens=st.integers(1, 4096),
    more=st.integers(0, 4096),
    hidden=st.integers(1, 8192),
    num_topk=st.integers(1, 32),
    use_fp8=st.booleans(),
)
@pytest.mark.parametrize("group", [(1, 1), (4, 1), (4, 2)], ids=lambda g: f"ranks{g[0]}x{g[1]}")
def test_the_size_hint_never_falls_when_a_shape_grows(
    group: tuple[int, int], tokens: int, more: int, hidden: int, num_topk: int, use_fp8: bool
) -> None:
    run_threads(
        group[0], compare_hints, tokens, more, hidden, num_topk, use_fp8, num_domains=group[1]
    )


def compare_hints(
    rank: Rank, tokens: int, more: int, hidden: int, num_topk: int, use_fp8: bool
) -> None:
    from deep_ep import EPBuffer

    def hint(tokens: int, hidden: int, num_topk: int, fp8: bool = use_fp8) -> int:
        return EPBuffer.get_buffer_size_hint(rank.group, tokens, hidden, num_topk, fp8)

    base = hint(tokens, hidden, num_topk)
    assert base > 0
    assert base % (2 << 20) == 0
    assert hint(tokens + more, hidden, num_topk) >= base
    assert hint(tokens, hidden + more, num_topk) >= base
    assert hint(tokens, hidden, min(32, num_topk + 1)) >= base
    assert hint(tokens, hidden, 0) == hint(tokens, hidden, 32)
    if hidden >= 128:  # narrower rows are smaller than their scales
        assert hint(tokens, hidden, num_topk, False) >= hint(tokens, hidden, num_topk, True)
