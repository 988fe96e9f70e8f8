"""Low-latency calls of V1 against the oracle, bit for bit, on every backend."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import legacy_exchange as ex
import legacy_oracle as oracle
import problem as problems
from deep_ep import Buffer, ContractError
from exchange import check_same, put, put_tokens
from problem import Problem
from ranks import Rank, RankPool, run_threads

GROUPS = [(1, 1), (2, 1), (3, 1), (4, 2), (8, 1)]  # ranks, domains
FORMATS = {
    "bf16": {"use_fp8": False},
    "fp8": {},
    "fp8_rounded": {"round_scale": True},
    "ue8m0": {"round_scale": True, "use_ue8m0": True},
}


pytestmark = pytest.mark.usefixtures("short_waits")


def shape(num_ranks: int, **changes: object) -> Problem:
    """Uneven token counts, some ranks without tokens, two experts a rank, room to spare."""
    tokens = (5, 0, 11, 3, 8, 1, 0, 6)[:num_ranks]
    settings = {
        "num_ranks": num_ranks,
        "tokens": tokens,
        "num_max_tokens": max(tokens) + 1,
        "num_experts": 2 * num_ranks,
        "num_topk": min(4, 2 * num_ranks),
        "hidden": 512,
        "routing": "masked",
    }
    return Problem(**settings | changes)


def call_dispatch(buffer: Buffer, rank: Rank, problem: Problem, **options: object) -> tuple:
    tokens = put_tokens(problems.tokens_of(problem)[rank.index])
    shape = (problem.max_tokens, problem.num_experts)
    return buffer.low_latency_dispatch(tokens.x, tokens.topk_idx, *shape, **options)


def check_received(
    rank: Rank,
    problem: Problem,
    recv_x: Tensor | tuple[Tensor, Tensor],
    count: Tensor,
    handle: tuple,
    use_fp8: bool = True,
    round_scale: bool = False,
    use_ue8m0: bool = False,
) -> None:
    tokens = problems.tokens_of(problem)
    expected = oracle.low_latency_layout(tokens, problem.num_experts, rank.index)
    num_local, room = problem.num_experts // rank.size, rank.size * problem.max_tokens
    sent = [(t.x, None) for t in tokens]
    if use_fp8:
        sent = [oracle.cast(t.x, round_scale) for t in tokens]
    if use_ue8m0:
        sent = [(codes, oracle.packed_exponents(factors)) for codes, factors in sent]
    data, sf = recv_x if use_fp8 else (recv_x, None)
    assert data.shape == (num_local, room, problem.hidden)
    assert data.is_contiguous()
    if use_fp8:
        assert data.dtype == torch.float8_e4m3fn
        data = data.view(torch.uint8)
        packs = sent[0][1].shape[1]
        assert sf.shape == (num_local, room, packs)
        assert sf.stride() == (room * packs, 1, room)
    assert count.dtype == torch.int32
    assert count.tolist() == [len(places) for places in expected.places]
    src_info, layout_range, *numbers = handle
    assert numbers == [problem.max_tokens, problem.hidden, problem.num_experts]
    assert layout_range.dtype == torch.int64
    assert layout_range.tolist() == expected.layout_range
    assert src_info.dtype == torch.int32
    assert src_info.shape == (num_local, room)
    for local, places in enumerate(expected.places):
        rows = len(places)
        assert src_info[local, :rows].tolist() == [token for _, token in places]
        for what, actual, part in (("data", data, 0), ("scales", sf, 1)):
            if actual is not None and rows:
                wanted = torch.stack([sent[s][part][token] for s, token in places])
                check_same(f"{what} of expert {local}", actual[local, :rows], wanted, rank.index)


def outputs_of(problem: Problem) -> list[Tensor]:
    """What each rank passes to combine: NaN in rows that nobody may read."""
    tokens, made = problems.tokens_of(problem), []
    for rank in range(problem.num_ranks):
        places = oracle.low_latency_layout(tokens, problem.num_experts, rank).places
        room = (len(places), problem.num_ranks * problem.max_tokens, problem.hidden)
        rows = torch.full(room, torch.nan, dtype=torch.bfloat16)
        for local, of_expert in enumerate(places):
            random = problems.generator(problem.seed, rank, local)
            rows[local, : len(of_expert)] = problems.make_terms(
                len(of_expert), problem.hidden, random
            )
        made.append(rows)
    return made


def expected_sum(rank: Rank, problem: Problem) -> Tensor:
    tokens = problems.tokens_of(problem)
    return oracle.low_latency_combine(tokens, problem.num_experts, rank.index, outputs_of(problem))


def call_combine(
    buffer: Buffer, rank: Rank, problem: Problem, handle: tuple, **options: object
) -> tuple:
    tokens = put_tokens(problems.tokens_of(problem)[rank.index])
    rows = put(outputs_of(problem)[rank.index])
    return buffer.low_latency_combine(rows, tokens.topk_idx, tokens.topk_weights, handle, **options)


def check_round_trip(rank: Rank, problem: Problem, options: dict[str, bool]) -> None:
    buffer = ex.make_buffer(rank, low_latency_mode=True)
    recv_x, count, handle, event, hook = call_dispatch(buffer, rank, problem, **options)
    assert event.event is None
    assert hook is None
    check_received(rank, problem, recv_x, count, handle, **options)
    for _ in range(2):  # a handle may be used again
        combined, event, hook = call_combine(buffer, rank, problem, handle)
        assert event.event is None
        assert hook is None
        check_same("combined_x", combined, expected_sum(rank, problem), rank.index)
    buffer.destroy()


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("group", GROUPS, ids=lambda g: f"ranks{g[0]}x{g[1]}")
def test_dispatch_and_combine_agree_with_the_oracle(
    pool: RankPool, backend: str, group: tuple[int, int], options: dict[str, bool]
) -> None:
    pool.run(group[0], check_round_trip, shape(group[0]), options, num_domains=group[1])


def test_lanes_add_up_in_ascending_order(backend: str) -> None:
    run_threads(2, check_order, shape(2, num_topk=8, num_experts=16))


def check_order(rank: Rank, problem: Problem) -> None:
    """Equal weights: large rows cancel each other, and small ones are lost between them."""
    buffer = ex.make_buffer(rank)
    handle = call_dispatch(buffer, rank, problem)[2]
    tokens = problems.tokens_of(problem)
    tokens = [replace(t, topk_weights=torch.full_like(t.topk_weights, 0.5)) for t in tokens]
    own, outputs = put_tokens(tokens[rank.index]), outputs_of(problem)
    combined, _, _ = buffer.low_latency_combine(
        put(outputs[rank.index]), own.topk_idx, own.topk_weights, handle
    )
    expected = oracle.low_latency_combine(tokens, problem.num_experts, rank.index, outputs)
    check_same("combined_x", combined, expected, rank.index)
    buffer.destroy()


SHAPES = {
    "no_tokens": shape(3, tokens=0),
    "no_routes": shape(3, routing="none"),
    "hot_expert": shape(3, tokens=7, num_max_tokens=7, routing="hot"),
    "duplicates": shape(3, routing="duplicates", num_topk=8),
    "full": shape(2, tokens=9, num_max_tokens=9, num_topk=2, num_experts=2),
    "topk1": shape(2, num_topk=1),
    "topk11": shape(2, num_topk=11, num_experts=12),
    "hidden128": shape(2, hidden=128),
    "hidden2560": shape(2, hidden=2560, tokens=(2, 1), num_max_tokens=2),
    "odd_experts": shape(3, num_experts=21),
}


@pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES.keys())
def test_unusual_shapes_agree_with_the_oracle(
    run: Any,  # noqa: ANN401
    backend: str,
    problem: Problem,
) -> None:
    run(problem.num_ranks, check_round_trip, problem, {})


@pytest.mark.parametrize("hidden", [2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192])
def test_l7_hidden_sizes_of_models(backend: str, hidden: int) -> None:
    problem = shape(2, tokens=(1, 2), num_max_tokens=4, hidden=hidden)
    run_threads(2, check_round_trip, problem, FORMATS["ue8m0"])


def test_values_of_every_size_are_quantised_as_specified(backend: str) -> None:
    run_threads(1, quantise_extremes)


def quantise_extremes(rank: Rank) -> None:
    """Zeros, blocks below the least amax, powers of two, ties, the largest and the least values."""
    random = problems.generator(5)
    scale = torch.randint(-60, 60, (24, 4, 1), generator=random).float().exp2()
    x = (torch.randn(24, 4, 128, generator=random) * scale).view(24, 512)
    x[0] = 0
    x[1] = -0.0
    x[2] = torch.arange(512).remainder(128).sub(64).float()
    x[3] = 448 * 2.0**20
    x[4, ::2] = 3e38
    x = x.bfloat16()
    buffer = ex.make_buffer(rank)
    for round_scale in (False, True):
        (data, sf), *_ = buffer.low_latency_dispatch(
            put(x), put(torch.zeros(24, 1, dtype=torch.int64)), 24, 1, round_scale=round_scale
        )
        codes, factors = oracle.cast(x, round_scale)
        check_same("data", data[0].view(torch.uint8), codes, 0)
        check_same("factors", sf[0], factors, 0)
    buffer.destroy()


def test_e8_inputs_may_be_overwritten_before_the_hook(backend: str) -> None:
    run_threads(2, overwrite_inputs, shape(2, num_topk=1))


def overwrite_inputs(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank)
    tokens = put_tokens(problems.tokens_of(problem)[rank.index])
    x, topk_idx = tokens.x.clone(), tokens.topk_idx.clone()
    if rank.index == 1:
        rank.barrier()  # comes to the exchange when rank 0 has overwritten its inputs
    recv_x, count, handle, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, problem.max_tokens, problem.num_experts, use_fp8=False, return_recv_hook=True
    )
    x.zero_()
    topk_idx.zero_()
    if rank.index == 0:
        rank.barrier()
    hook()
    check_received(rank, problem, recv_x, count, handle, use_fp8=False)
    buffer.destroy()


def test_e8_outputs_are_the_callers_once_the_hook_has_run(backend: str) -> None:
    run_threads(1, drop_outputs, shape(1))


def drop_outputs(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank)
    (data, _), count, handle, event, hook = call_dispatch(
        buffer, rank, problem, return_recv_hook=True
    )
    hook()
    references = weakref.ref(data), weakref.ref(handle.core)
    del data, handle
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    buffer.destroy()


def test_ids_of_32_bits_are_taken(backend: str) -> None:
    run_threads(2, dispatch_small_ids, shape(2, routing="duplicates"))


def dispatch_small_ids(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank)
    tokens = put_tokens(problems.tokens_of(problem)[rank.index])
    ids, rows = tokens.topk_idx.int(), put(outputs_of(problem)[rank.index])
    _, _, handle, _, _ = buffer.low_latency_dispatch(
        tokens.x, ids, problem.max_tokens, problem.num_experts
    )
    combined, _, _ = buffer.low_latency_combine(rows, ids, tokens.topk_weights, handle)
    check_same("combined_x", combined, expected_sum(rank, problem), rank.index)
    buffer.destroy()


# --- the three ways to wait -----------------------------------------------------------------------


def test_e9_l1_results_come_with_the_hook(run: Any, backend: str) -> None:  # noqa: ANN401
    run(3, receive_by_hook, shape(3))


def receive_by_hook(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank)
    recv_x, count, handle, event, hook = call_dispatch(buffer, rank, problem, return_recv_hook=True)
    assert event.event is None
    for tensor in (*recv_x, count, *handle[:2]):  # ours until the hook: it may not be read before
        tensor.view(torch.uint8).fill_(255) if tensor.is_contiguous() else tensor.fill_(-1)
    hook()
    check_received(rank, problem, recv_x, count, handle)
    out = put(torch.full((problem.num_tokens[rank.index], problem.hidden), 7.0).bfloat16())
    combined, event, hook = call_combine(
        buffer, rank, problem, handle, return_recv_hook=True, out=out
    )
    assert combined is out
    assert event.event is None
    assert (out == 7).all()
    hook()
    check_same("combined_x", out, expected_sum(rank, problem), rank.index)
    out.fill_(7)
    hook()  # again: nothing happens
    assert (out == 7).all()
    buffer.destroy()


def test_l1_results_come_with_the_event(run: Any, backend: str) -> None:  # noqa: ANN401
    run(3, receive_by_event, shape(3))


def receive_by_event(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank)
    recv_x, count, handle, event, hook = call_dispatch(buffer, rank, problem, async_finish=True)
    assert event.event is not None
    assert hook is None
    event.current_stream_wait()
    check_received(rank, problem, recv_x, count, handle)
    combined, event, hook = call_combine(buffer, rank, problem, handle, async_finish=True)
    assert event.event is not None
    assert hook is None
    event.current_stream_wait()
    check_same("combined_x", combined, expected_sum(rank, problem), rank.index)
    buffer.destroy()


def test_l6_two_dispatches_and_two_combines_may_be_under_way(run: Any, backend: str) -> None:  # noqa: ANN401
    run(3, cross_two_batches, shape(3), shape(3, seed=4, tokens=(2, 12, 1)))


def cross_two_batches(rank: Rank, first: Problem, second: Problem) -> None:
    buffer = ex.make_buffer(rank)
    both = (first, second)
    for order in ((0, 1), (1, 0)):
        sent = [call_dispatch(buffer, rank, p, return_recv_hook=True) for p in both]
        for which in order:
            sent[which][4]()
        for problem, (recv_x, count, handle, _, _) in zip(both, sent, strict=True):
            check_received(rank, problem, recv_x, count, handle)
        combined = [
            call_combine(buffer, rank, p, results[2], return_recv_hook=True)
            for p, results in zip(both, sent, strict=True)
        ]
        for which in order:
            combined[which][2]()
        for problem, (result, _, _) in zip(both, combined, strict=True):
            check_same("combined_x", result, expected_sum(rank, problem), rank.index)
    buffer.destroy()


def test_l5_a_graph_replays_dispatch_and_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use")
    monkeypatch.setenv("EP_DEVICE", "cuda")
    run_threads(1, replay, shape(1, tokens=5, num_max_tokens=8, num_experts=4, num_topk=3))


def replay(rank: Rank, problem: Problem) -> None:
    """Other contents at the same addresses with each replay."""
    buffer = ex.make_buffer(rank)
    tokens = put_tokens(problems.tokens_of(problem)[0])
    inputs = [tokens.x, tokens.topk_idx, tokens.topk_weights, put(outputs_of(problem)[0])]
    x, topk_idx, topk_weights, rows = inputs
    out = torch.empty_like(x)

    def calls() -> tuple:
        recv_x, count, handle, _, _ = buffer.low_latency_dispatch(
            x, topk_idx, problem.max_tokens, problem.num_experts
        )
        buffer.low_latency_combine(rows, topk_idx, topk_weights, handle, out=out)
        return recv_x, count, handle

    calls()  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        received = calls()
    for seed in range(3):
        variant = problem.rerouted(seed)
        tokens = problems.tokens_of(variant)[0]
        values = [tokens.x, tokens.topk_idx, tokens.topk_weights, outputs_of(variant)[0]]
        for tensor, value in zip(inputs, values, strict=True):
            tensor.copy_(value)
        graph.replay()
        check_received(rank, variant, *received)
        check_same("combined_x", out, expected_sum(rank, variant), rank.index)
    del graph
    buffer.destroy()


# --- buffers, statistics, masks -------------------------------------------------------------------


def test_l9_zero_copy_takes_the_rows_from_the_buffer(backend: str) -> None:
    run_threads(3, combine_in_place, shape(3))


def combine_in_place(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank)
    handle = call_dispatch(buffer, rank, problem)[2]
    tokens = put_tokens(problems.tokens_of(problem)[rank.index])
    rows = put(outputs_of(problem)[rank.index])
    for _ in range(2):
        room = buffer.get_next_low_latency_combine_buffer(handle)
        assert room.shape == rows.shape
        assert room.dtype == torch.bfloat16
        room.copy_(rows)
        combined, _, _ = buffer.low_latency_combine(
            torch.zeros_like(rows), tokens.topk_idx, tokens.topk_weights, handle, zero_copy=True
        )
        check_same("combined_x", combined, expected_sum(rank, problem), rank.index)
    buffer.destroy()


def test_l3_a_handle_that_was_put_together_again_is_taken(backend: str) -> None:
    run_threads(3, combine_rebuilt, shape(3, routing="duplicates"))


def combine_rebuilt(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank)
    handle = call_dispatch(buffer, rank, problem)[2]
    combined, _, _ = call_combine(buffer, rank, problem, (*handle,), use_logfmt=True)
    check_same("combined_x", combined, expected_sum(rank, problem), rank.index)
    buffer.destroy()


def test_received_rows_are_counted_on_top_of_what_the_statistics_hold(backend: str) -> None:
    run_threads(3, count_received, shape(3, routing="duplicates"))


def count_received(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank)
    stats, waits = put(torch.full((2,), 100, dtype=torch.int32)), put(torch.zeros(3).long())
    for times in (1, 2):
        _, count, _, event, hook = call_dispatch(
            buffer,
            rank,
            problem,
            cumulative_local_expert_recv_stats=stats,
            dispatch_wait_recv_cost_stats=waits,
            return_recv_hook=times == 2,
        )
        if hook is not None:
            hook()
        assert stats.tolist() == [100 + times * n for n in count.tolist()]
    buffer.destroy()


def test_c14_low_latency_maintenance(backend: str) -> None:
    def body(rank: Rank) -> None:
        size = Buffer.get_low_latency_rdma_size_hint(12, 512, 2, 4)
        buffer = Buffer(rank.group, 0, size, low_latency_mode=True, enable_shrink=True)
        buffer.clean_low_latency_buffer(12, 512, 4)
        mask = put(torch.full((2,), 9, dtype=torch.int32))
        buffer.low_latency_query_mask_buffer(mask)
        assert mask.tolist() == [0, 0]
        buffer.low_latency_clean_mask_buffer()
        buffer.low_latency_update_mask_buffer(1, False)
        with pytest.raises(NotImplementedError):
            buffer.low_latency_update_mask_buffer(1, True)
        memory = buffer.get_local_buffer_tensor(dtype=torch.int32, use_rdma_buffer=True)
        assert memory.numel() == size // 4
        memory.fill_(-1)
        check_on(buffer, rank)
        assert (memory == -1).all()

    def check_on(buffer: Buffer, rank: Rank) -> None:
        problem = shape(2)
        recv_x, count, handle, _, _ = call_dispatch(buffer, rank, problem)
        check_received(rank, problem, recv_x, count, handle)

    run_threads(2, body)


def test_masks_need_enable_shrink() -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank)
        with pytest.raises(ContractError):
            buffer.low_latency_clean_mask_buffer()
        buffer.destroy()

    run_threads(1, body)


def test_c6_the_size_hint_is_that_of_v1() -> None:
    """2 * (send + receive + signals), rounded up: send 256 rows, receive 256, of 14,560 bytes."""
    row = 2 * 7168 + 7168 // 128 * 4
    hint = Buffer.get_low_latency_rdma_size_hint(8, 7168, 4, 32)
    assert hint == (2 * (256 * row + 256 * row + 128) + 128) // 128 * 128
    by_name = Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=8, hidden=7168, num_ranks=4, num_experts=32
    )
    assert by_name == hint


# --- mistakes -------------------------------------------------------------------------------------

WRONG = {
    "many_tokens": {"num_max_dispatch_tokens_per_rank": 3},
    "float_x": {"x": torch.zeros(4, 512)},
    "odd_hidden": {"x": torch.zeros(4, 100, dtype=torch.bfloat16)},
    "ue8m0_hidden": {
        "x": torch.zeros(4, 128, dtype=torch.bfloat16),
        "round_scale": True,
        "use_ue8m0": True,
    },
    "ue8m0_alone": {"use_ue8m0": True},
    "two_ways": {"async_finish": True, "return_recv_hook": True},
    "experts": {"num_experts": 3},
    "statistics": {"cumulative_local_expert_recv_stats": torch.zeros(2)},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_mistake_of_one_rank_raises_on_all_and_leaves_the_buffer_usable(
    wrong: dict[str, Any],
) -> None:
    def body(rank: Rank) -> None:
        problem = shape(2, tokens=4, num_max_tokens=4)
        buffer = ex.make_buffer(rank)
        tokens = problems.tokens_of(problem)[rank.index]
        arguments = {
            "x": tokens.x,
            "topk_idx": tokens.topk_idx,
            "num_max_dispatch_tokens_per_rank": 4,
            "num_experts": problem.num_experts,
        }
        error = ContractError if rank.index == 0 else RuntimeError
        with pytest.raises(error):
            buffer.low_latency_dispatch(**arguments | (wrong if rank.index == 0 else {}))
        recv_x, count, handle, _, _ = call_dispatch(buffer, rank, problem)
        check_received(rank, problem, recv_x, count, handle)
        buffer.destroy()

    run_threads(2, body)


def test_a_combine_before_the_hook_of_its_dispatch_is_refused() -> None:
    def body(rank: Rank) -> None:
        problem = shape(1)
        buffer = ex.make_buffer(rank)
        _, _, handle, _, hook = call_dispatch(buffer, rank, problem, return_recv_hook=True)
        with pytest.raises(ContractError, match="hook"):
            call_combine(buffer, rank, problem, handle)
        hook()
        with pytest.raises(ContractError, match="zero_copy"):
            call_combine(buffer, rank, problem, handle, zero_copy=True)
        buffer.destroy()

    run_threads(1, body)
