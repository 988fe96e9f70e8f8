"""Throughput calls of V1 against the oracle, bit for bit, on every backend."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

import legacy_exchange as ex
import legacy_oracle as oracle
import problem as problems
from deep_ep import Buffer, ContractError
from deep_ep.buffers.legacy import Config
from exchange import check_same, put
from problem import Problem
from ranks import Rank, RankPool, run_threads

GROUPS = [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (6, 3), (8, 1)]  # ranks, domains


pytestmark = pytest.mark.usefixtures("short_waits")


def shape(num_ranks: int, num_domains: int = 1, **changes: object) -> Problem:
    """Uneven token counts, some ranks without tokens, two experts a rank."""
    settings = {
        "num_ranks": num_ranks,
        "num_domains": num_domains,
        "tokens": (5, 0, 11, 3, 8, 1, 0, 6)[:num_ranks],
        "num_experts": 2 * num_ranks,
        "num_topk": min(4, 2 * num_ranks),
        "routing": "masked",
    }
    return Problem(**settings | changes)


def check_round_trip(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank)
    ex.check_layout(buffer, rank, problem)
    handle = ex.check_dispatch(buffer, rank, problem, expert_alignment=8)
    for num_bias, with_weights in ((0, True), (1, False), (2, True)):
        ex.check_combine(buffer, rank, problem, handle, num_bias, with_weights)
    buffer.destroy()


@pytest.mark.parametrize("routing", ["masked", "duplicates"])
@pytest.mark.parametrize("group", GROUPS, ids=lambda g: f"ranks{g[0]}x{g[1]}")
def test_dispatch_and_combine_agree_with_the_oracle(
    pool: RankPool, backend: str, group: tuple[int, int], routing: str
) -> None:
    pool.run(group[0], check_round_trip, shape(*group, routing=routing), num_domains=group[1])


SHAPES = {
    "no_tokens": shape(4, tokens=0),
    "one_sender": shape(4, tokens=(9, 0, 0, 0), routing="last"),
    "no_routes": shape(4, tokens=6, routing="none"),
    "hot_expert": shape(4, tokens=7, routing="hot"),
    "one_expert_a_rank": shape(3, num_experts=3, num_topk=2),
    "domains_and_duplicates": shape(4, 2, num_experts=4, num_topk=6, routing="duplicates"),
    "tokens222_topk16": shape(2, tokens=222, num_topk=16, num_experts=32, hidden=128),
    "topk32": shape(3, num_topk=32, num_experts=48, routing="duplicates"),
    "topk1": shape(2, num_topk=1),
    "hidden1": shape(2, hidden=1),
    "hidden2880": shape(2, hidden=2880),
}


@pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES.keys())
def test_unusual_shapes_agree_with_the_oracle(
    run: Any,  # noqa: ANN401
    backend: str,
    problem: Problem,
) -> None:
    run(problem.num_ranks, check_round_trip, problem, num_domains=problem.num_domains)


@pytest.mark.parametrize("sf_dtype", ["fp32", "ue8m0"])
@pytest.mark.parametrize("sf_layout", ["row", "column", "tma", "strided"])
def test_fp8_rows_and_scales_arrive_from_every_layout(
    backend: str, sf_dtype: str, sf_layout: str
) -> None:
    problem = shape(3, dtype="fp8", hidden=256, sf_dtype=sf_dtype, sf_layout=sf_layout)
    run_threads(3, dispatch_fp8, problem)


def dispatch_fp8(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank)
    handle = ex.check_dispatch(buffer, rank, problem)
    check_cached(buffer, rank, problem, problem, handle)
    buffer.destroy()


def check_cached(
    buffer: Buffer, rank: Rank, routed: Problem, variant: Problem, handle: tuple
) -> None:
    """A cached dispatch of the rows of one problem by the routing of another."""
    rows = problems.tokens_of(variant)
    tokens = [
        replace(row, topk_idx=old.topk_idx, topk_weights=old.topk_weights)
        for old, row in zip(problems.tokens_of(routed), rows, strict=True)
    ]
    x, x_sf = rows[rank.index].x, rows[rank.index].x_sf
    recv_x, *nothing, event = buffer.dispatch(
        put(x) if x_sf is None else (put(x), put(x_sf)), handle=handle
    )
    assert nothing == [None] * 4
    assert event.event is None
    ex.check_rows(recv_x, oracle.dispatch(tokens, routed.num_experts, rank.index), rank)


@pytest.mark.parametrize("group", [(2, 1), (3, 1), (4, 2)], ids=lambda g: f"ranks{g[0]}x{g[1]}")
def test_a_cached_dispatch_repeats_the_routing_for_any_dtype_and_hidden(
    pool: RankPool, backend: str, group: tuple[int, int]
) -> None:
    pool.run(group[0], dispatch_cached, shape(*group), num_domains=group[1])


def dispatch_cached(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank)
    handle = ex.check_dispatch(buffer, rank, problem)
    other = ex.check_dispatch(buffer, rank, problem.rerouted(7))
    for variant in (
        problem,
        replace(problem, hidden=56),
        replace(problem, dtype="fp8", hidden=128, num_sf=1),
    ):
        check_cached(buffer, rank, problem, variant, handle)
        ex.check_combine(buffer, rank, replace(problem, hidden=variant.hidden), handle)
    ex.check_combine(buffer, rank, problem.rerouted(7), other)
    buffer.destroy()


# --- without counts, without ids ------------------------------------------------------------------


@pytest.mark.parametrize("group", [(1, 1), (3, 1), (4, 2)], ids=lambda g: f"ranks{g[0]}x{g[1]}")
def test_a_dispatch_without_ids_sends_the_same_rows(
    pool: RankPool, backend: str, group: tuple[int, int]
) -> None:
    problem = shape(*group, routing="duplicates")
    pool.run(group[0], dispatch_without_ids, problem, num_domains=group[1])


def dispatch_without_ids(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank)
    for variant in (problem, replace(problem, dtype="fp8", hidden=128, num_sf=1)):
        tokens = problems.tokens_of(variant)
        arguments = ex.arguments_of(buffer, tokens[rank.index], problem.num_experts)
        arguments |= {"topk_idx": None, "topk_weights": None, "expert_alignment": 4}
        recv_x, ids, weights, counts, handle, _ = buffer.dispatch(**arguments)
        expected = oracle.dispatch(tokens, problem.num_experts, rank.index)
        ex.check_rows(recv_x, expected, rank)
        assert ids is None
        assert weights is None
        assert counts == [-(-count // 4) * 4 for count in expected.counts]
        ex.check_handle(handle, expected, rank)
        ex.check_combine(buffer, rank, variant, handle, num_bias=1)
    buffer.destroy()


@pytest.mark.parametrize("extra", [0, 1, 7])
def test_with_a_worst_case_of_rows_nothing_waits_for_the_counts(backend: str, extra: int) -> None:
    run_threads(3, dispatch_worst_case, shape(3, routing="duplicates"), extra)


def dispatch_worst_case(rank: Rank, problem: Problem, extra: int) -> None:
    buffer = ex.make_buffer(rank)
    tokens = problems.tokens_of(problem)
    num_worst = 3 * problem.max_tokens + extra
    recv_x, ids, weights, counts, handle, _ = buffer.dispatch(
        **ex.arguments_of(buffer, tokens[rank.index], problem.num_experts),
        num_worst_tokens=num_worst,
    )
    expected = oracle.dispatch(tokens, problem.num_experts, rank.index)
    received = len(expected.x)
    assert counts == []
    assert len(recv_x) == len(ids) == len(weights) == num_worst
    check_same("recv_x", recv_x[:received], expected.x, rank.index)
    check_same("recv_topk_idx", ids[:received], expected.topk_idx, rank.index)
    check_same("recv_topk_weights", weights[:received], expected.topk_weights, rank.index)
    assert (ids[received:] == -1).all()
    assert handle[0][:, rank.index].tolist() == expected.psum
    for _ in range(2):
        ex.check_combine(buffer, rank, problem, handle, num_bias=1, num_rows=num_worst)
        again = buffer.dispatch(put(tokens[rank.index].x), handle=handle)[0]
        assert len(again) == num_worst
        check_same("recv_x again", again[:received], expected.x, rank.index)
        handle = tuple(part.clone() for part in handle)  # and once more with copies alone
        gc.collect()
    buffer.destroy()


# --- handles --------------------------------------------------------------------------------------


class Saving(torch.autograd.Function):
    """Saves a handle as a trainer does, and hands it out again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, handle: tuple, seen: list) -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(*handle)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # noqa: ANN401
        ctx.seen.append(ctx.saved_tensors)
        return grad, None, None


@pytest.mark.parametrize("group", [(3, 1), (4, 2)], ids=lambda g: f"ranks{g[0]}x{g[1]}")
@pytest.mark.parametrize("offload", [False, True], ids=["saved", "offloaded"])
def test_a_handle_lives_in_what_autograd_saves(
    pool: RankPool, backend: str, group: tuple[int, int], offload: bool
) -> None:
    pool.run(group[0], use_saved_handle, shape(*group), offload, num_domains=group[1])


def use_saved_handle(rank: Rank, problem: Problem, offload: bool) -> None:
    """Offloading copies the tensors, so that not even their memory is what dispatch returned."""
    buffer = ex.make_buffer(rank)
    handle = ex.check_dispatch(buffer, rank, problem)
    x, seen = torch.ones(1, requires_grad=True), []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if offload else tensor

    with torch.autograd.graph.saved_tensors_hooks(copy, lambda tensor: tensor):
        y = Saving.apply(x, handle, seen)
    del handle
    gc.collect()
    ex.check_dispatch(buffer, rank, problem.rerouted(3))  # another layer
    y.sum().backward()
    (saved,) = seen
    check_cached(buffer, rank, problem, problem, saved)
    ex.check_combine(buffer, rank, problem, saved, num_bias=1)
    buffer.destroy()


def test_the_routing_goes_with_the_last_tensor_of_the_handle(backend: str) -> None:
    run_threads(2, drop_handle, shape(2))


def drop_handle(rank: Rank, problem: Problem) -> None:
    from deep_ep.buffers import legacy_handle

    buffer = ex.make_buffer(rank)
    handle = ex.check_dispatch(buffer, rank, problem)
    name = int(handle[-1][0])
    core = weakref.ref(legacy_handle.find_routing(handle, lambda _: None).core)
    kept = [part.view(-1) for part in handle]
    del handle
    gc.collect()
    assert core() is not None
    del kept
    gc.collect()
    assert core() is None
    assert name not in legacy_handle._routings
    buffer.destroy()


# --- mistakes -------------------------------------------------------------------------------------

WRONG = {
    "no_layout": {"is_token_in_rank": None},
    "ids_alone": {"topk_weights": None},
    "wrong_mask": {
        "is_token_in_rank": torch.zeros(4, 2, dtype=torch.bool),
        "num_tokens_per_rank": torch.zeros(2, dtype=torch.int32),
    },
    "wrong_counts": {"num_tokens_per_rank": torch.zeros(2, dtype=torch.int32)},
    "wrong_expert_counts": {"num_tokens_per_expert": torch.zeros(4, dtype=torch.int32)},
    "long_counts": {"num_tokens_per_rank": torch.zeros(2, dtype=torch.int64)},
    "bf16_with_scales": {"x": torch.zeros(4, 32)},
    "strided": {"x": torch.zeros(4, 64, dtype=torch.bfloat16)[:, ::2]},
    "few_scales": {"x": (torch.zeros(4, 128).to(torch.float8_e4m3fn), torch.zeros(3, 1))},
    "few_ids": {"topk_idx": torch.zeros(3, 4, dtype=torch.int64)},
    "flat_ids": {"topk_idx": torch.zeros(4, dtype=torch.int64)},
    "few_weights": {"topk_weights": torch.zeros(3, 4)},
    "long_mask": {"is_token_in_rank": torch.zeros(5, 2, dtype=torch.bool)},
    "alignment": {"expert_alignment": 0},
    "few_worst_tokens": {"num_worst_tokens": 7},
    "odd_sms": {"config": Config(num_sms=3)},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_mistake_of_one_rank_raises_on_all_and_leaves_the_buffer_usable(
    wrong: dict[str, Any],
) -> None:
    def body(rank: Rank) -> None:
        problem = Problem(tokens=4, num_experts=4)
        buffer = ex.make_buffer(rank)
        arguments = ex.arguments_of(buffer, problems.tokens_of(problem)[rank.index], 4)
        if rank.index == 0:
            with pytest.raises(ContractError):
                buffer.dispatch(**arguments | wrong)
        else:
            with pytest.raises(RuntimeError):
                buffer.dispatch(**arguments)
        handle = ex.check_dispatch(buffer, rank, problem)
        ex.check_combine(buffer, rank, problem, handle)
        buffer.destroy()

    run_threads(2, body)


def test_ids_that_are_too_large_are_refused() -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank)
        with pytest.raises(ContractError, match="below num_experts 4, got 4"):
            buffer.get_dispatch_layout(torch.tensor([[4]]), 4)
        buffer.destroy()

    run_threads(1, body)


def test_what_is_no_handle_is_refused() -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank)
        handle = ex.check_dispatch(buffer, rank, shape(1))
        x = torch.zeros(0, 32, dtype=torch.bfloat16)
        for wrong in ((), handle[:5], None, (None,) * 6):
            with pytest.raises((ContractError, TypeError)):
                buffer.combine(x, wrong)
        with pytest.raises(ContractError):
            buffer.dispatch(x, handle=handle, topk_idx=torch.zeros(0, 1, dtype=torch.int64))
        buffer.destroy()

    run_threads(1, body)
