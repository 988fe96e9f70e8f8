"""Inputs on which software of this kind has failed for its users, each under its catalogue number.

What a case needs beyond one input is in the suite of that kind: C006 C035 C039 C072 C075 C081 C086
in test_failures, C005 C080 in test_autograd, C016 C021 in test_events, C079 in test_properties,
C109 in test_api_contract, C142 C144 C146 C147 in test_life_cycle.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_ep
import exchange as ex
import oracle
import problem as problems
from deep_ep import EPBuffer
from exchange import Call
from problem import REAL_HIDDEN_SIZES, Problem
from ranks import Rank, RankPool, run_threads

BOTH = [Call(), Call(do_expand=True)]
BOTH_IDS = ["compact", "expand"]


def round_trip(problem: Problem, call: Call) -> None:
    run_threads(
        problem.num_ranks, ex.check_round_trip, problem, call, num_domains=problem.num_domains
    )


# --- capacity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 2, 7, 32, 64, 255, 256])
def test_c034_every_capacity_works_and_nothing_beside_it_is_touched(
    backend: str, capacity: int
) -> None:
    hidden = 7168 if capacity <= 7 else 256
    problem = Problem(8, tokens=capacity, hidden=hidden, num_topk=8, num_experts=32)
    run_threads(8, exchange_between_canaries, problem)


def exchange_between_canaries(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank, problem)
    canaries = []

    def guard() -> None:
        canaries.append(buffer.empty((3, 4096), torch.int32).fill_(rank.index + 1))

    guard()
    for call in BOTH:
        call = replace(call, lent_outputs=True)
        handle = ex.check_dispatch(buffer, rank, problem, call)[3]
        guard()
        ex.check_combine(buffer, rank, problem, call, handle)
        guard()
    assert all((canary == rank.index + 1).all() for canary in canaries)
    buffer.destroy()


@pytest.mark.parametrize("capacity", [1025, 2048, 8192])
def test_c036_capacities_beyond_ten_bits_work_without_cpu_sync(backend: str, capacity: int) -> None:
    problem = Problem(2, tokens=(capacity, capacity - 3), hidden=4, num_topk=2, num_experts=4)
    round_trip(problem, Call(cpu_sync=False))


def test_c037_token_counts_may_change_freely_within_the_capacity(backend: str) -> None:
    def body(rank: Rank) -> None:
        problem = Problem(4, num_max_tokens=512, hidden=16)
        buffer = ex.make_buffer(rank, problem)
        for counts in ((10, 10, 10, 10), (1, 500, 0, 37), (512, 0, 512, 1)):
            this = replace(problem, tokens=counts)
            handle = ex.check_dispatch(buffer, rank, this, Call())[3]
            ex.check_combine(buffer, rank, this, Call(), handle)
        buffer.destroy()

    run_threads(4, body)


def test_c040_a_buffer_sized_for_small_rows_serves_or_refuses_large_ones(backend: str) -> None:
    def body(rank: Rank) -> None:
        small = Problem(2, tokens=64, hidden=64, num_topk=2, dtype="fp8", num_sf=1)
        large = Problem(2, tokens=512, hidden=2048, num_topk=8)
        buffer = ex.make_buffer(rank, small)
        for problem in (small, large, small):
            handle = ex.check_dispatch(buffer, rank, problem, Call())[3]
            ex.check_combine(buffer, rank, problem, Call(), handle)
        buffer.destroy()

    run_threads(2, body)


@pytest.mark.parametrize("call", BOTH, ids=BOTH_IDS)
def test_c044_all_tokens_of_all_ranks_fit_on_one(backend: str, call: Call) -> None:
    problem = Problem(4, tokens=33, num_topk=2, num_experts=8, routing="last", hidden=24)
    round_trip(problem, replace(call, alignment=16))
    spread = replace(problem, routing="random", num_topk=8)  # every rank gets every token
    round_trip(spread, replace(call, cpu_sync=False, alignment=16))


# --- empty ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", BOTH, ids=BOTH_IDS)
def test_c001_ranks_without_tokens_take_part(backend: str, call: Call) -> None:
    round_trip(Problem(8, tokens=(4, 0, 0, 0, 0, 0, 0, 0), num_experts=16, num_topk=8), call)


def test_c002_tensors_without_elements_may_have_no_address(backend: str) -> None:
    def body(rank: Rank) -> None:
        problem = Problem(4, tokens=(0, 3, 0, 2))
        exchange = problems.exchange_of(problem)
        tokens = exchange.tokens[rank.index]
        if len(tokens.x) == 0:
            assert tokens.x.data_ptr() == 0
        buffer = ex.make_buffer(rank, problem)
        handle = ex.check_dispatch(buffer, rank, problem, Call(num_bias=2))[3]
        ex.check_combine(buffer, rank, problem, Call(num_bias=2), handle)
        buffer.destroy()

    run_threads(4, body)


def test_c004_one_rank_receives_everything_200_times(backend: str) -> None:
    def body(rank: Rank) -> None:
        problem = Problem(4, tokens=(3, 5, 2, 4), num_experts=8, routing="hot", hidden=8)
        buffer = ex.make_buffer(rank, problem)
        exchange = problems.exchange_of(problem)
        arguments = ex.dispatch_arguments(exchange.tokens[rank.index], exchange, Call())
        for _ in range(200):
            x, _, _, handle, _ = buffer.dispatch(**arguments)
            combined = buffer.combine(x, handle)[0]
            ex.check_same("combined_x", combined, exchange.tokens[rank.index].x, rank.index)
        buffer.destroy()

    run_threads(4, body)


# --- ids ------------------------------------------------------------------------------------------

DUPLICATES = torch.tensor([[5, 5, 2, -1], [0, 0, 0, 0], [-1, -1, -1, -1], [7, 1, 7, 1]])


@pytest.mark.parametrize("multiple", [True, False], ids=["multiple", "single"])
@pytest.mark.parametrize("call", BOTH, ids=BOTH_IDS)
def test_c071_an_expert_that_is_repeated_counts_once_a_slot(
    backend: str, call: Call, multiple: bool
) -> None:
    call = replace(call, multiple_reduction=multiple)

    def body(rank: Rank) -> None:
        x = problems.make_x(4, 16, "bf16", problems.generator(rank.index))
        weights = torch.rand(4, 4, generator=problems.generator(1, rank.index))
        options = {"num_max_tokens_per_rank": 4, "hidden": 16, "num_topk": 4}
        buffer = ex.make_buffer(rank, Problem(), call, **options)
        rows, _, row_weights, handle, _ = buffer.dispatch(
            x, DUPLICATES, weights, num_experts=8, do_expand=call.do_expand
        )
        # Of each source tokens 0 1 3 reach rank 0, with 1 + 4 + 2 slots; 0 and 3 rank 1, 2 + 2.
        each = ((3, 2), (7, 4))[call.do_expand][rank.index]
        assert len(rows) == 2 * each
        combined, returned, _ = buffer.combine(
            rows, handle, topk_weights=row_weights if multiple or not call.do_expand else None
        )
        slots = [3, 4, 0, 4] if call.do_expand else [2, 1, 0, 2]
        wanted = torch.tensor(slots)[:, None] * x.float()
        torch.testing.assert_close(combined.float(), wanted, rtol=2e-2, atol=1e-6)
        if returned is not None:
            kept = torch.where(DUPLICATES >= 0, weights, 0.0)
            ex.check_same("weights", returned, kept, rank.index)
        buffer.destroy()

    run_threads(2, body)


def test_c071_a_repeated_expert_never_overruns_a_worst_case(backend: str) -> None:
    """Expanded without CPU sync there is no room for it: refused, on all ranks."""

    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, Problem(tokens=4, hidden=16))
        x = torch.ones(1, 16, dtype=torch.bfloat16)
        ids = torch.zeros(1, 4, dtype=torch.int64)
        options = {"num_experts": 2, "do_expand": True}
        with pytest.raises((ValueError, RuntimeError), match="repeated|do_cpu_sync"):
            buffer.dispatch(x, ids, **options, do_cpu_sync=False)
        rows = buffer.dispatch(x, ids, **options)[0]
        assert len(rows) == (8 if rank.index == 0 else 0)
        buffer.destroy()

    run_threads(2, body)


@pytest.mark.parametrize("value", [8, 11, 1 << 31, (1 << 62) + 1], ids=str)
def test_c072_ids_past_the_last_expert_are_refused_with_token_and_value(
    backend: str, value: int
) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, Problem(hidden=8))
        ids = torch.tensor([[0, 1], [2, value if rank.index == 1 else 3]])
        with pytest.raises((ValueError, RuntimeError), match=rf"token 1\b.*|{value}") as caught:
            buffer.dispatch(torch.ones(2, 8, dtype=torch.bfloat16), ids, num_experts=8)
        assert str(value) in str(caught.value)
        assert "1" in str(caught.value)
        buffer.destroy()

    run_threads(2, body)


@pytest.mark.parametrize("value", [-1, -2, -(1 << 40)], ids=str)
def test_any_negative_id_selects_nothing(backend: str, value: int) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, Problem(hidden=8))
        ids = torch.tensor([[value, 1], [value, value]])
        x = torch.ones(2, 8, dtype=torch.bfloat16)
        rows, recv_ids, _, handle, _ = buffer.dispatch(x, ids, num_experts=2)
        assert len(rows) == (2 if rank.index == 1 else 0)
        assert recv_ids.tolist() == [[-1, 0]] * len(rows)
        assert buffer.combine(rows, handle)[0][:, 0].tolist() == [1, 0]
        buffer.destroy()

    run_threads(2, body)


@pytest.mark.parametrize("call", BOTH, ids=BOTH_IDS)
def test_c062_c074_of_32_ranks_4_have_a_token_and_the_others_none(backend: str, call: Call) -> None:
    """K=16 of 896 experts; the output of a token without expert is its bias."""
    problem = Problem(32, tokens=1, hidden=448, num_topk=16, num_experts=896)

    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, problem)
        tokens = list(problems.tokens_of(problem))
        for index in range(32):
            if index % 8:
                blank = torch.full_like(tokens[index].topk_idx, -1)
                tokens[index] = replace(tokens[index], topk_idx=blank)
        exchange = replace(problems.exchange_of(problem), tokens=tokens)
        mine = tokens[rank.index]
        results = ex.call_dispatch(buffer, call, **ex.dispatch_arguments(mine, exchange, call))
        received = oracle.dispatch(exchange, rank.index, do_expand=call.do_expand)
        ex.check_dispatched(received, results, rank.index, exchange, call)
        combined = buffer.combine(results[0], results[3], bias=mine.x)[0]
        if rank.index % 8:
            ex.check_same("combined_x", combined, mine.x, rank.index)
        buffer.destroy()

    run_threads(32, body)


# --- order and numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("call", BOTH, ids=BOTH_IDS)
def test_c156_the_same_inputs_give_the_same_bytes_twice(
    pool: RankPool, backend: str, call: Call
) -> None:
    pool.run(8, exchange_twice, Problem(8, tokens=30, num_topk=6, num_experts=16, hidden=64), call)


def exchange_twice(rank: Rank, problem: Problem, call: Call) -> None:
    buffer = ex.make_buffer(rank, problem)
    exchange = problems.exchange_of(problem)
    arguments = ex.dispatch_arguments(exchange.tokens[rank.index], exchange, call)
    seen: list[tuple] = []
    for turn in range(5):
        time.sleep(0.002 * ((turn * 7 + rank.index * 3) % 5))
        x, ids, _, handle, _ = buffer.dispatch(**arguments)
        outputs = problems.expert_outputs(problem, rank.index, len(x))
        seen.append((x, ids, buffer.combine(outputs, handle)[0]))
    for x, ids, combined in seen[1:]:
        ex.check_same("recv_x", x, seen[0][0], rank.index)
        ex.check_same("combined_x", combined, seen[0][2], rank.index)
        assert (ids is None) == (seen[0][1] is None)
    buffer.destroy()


@pytest.mark.parametrize("call", BOTH, ids=BOTH_IDS)
def test_c157_a_token_has_the_same_output_alone_and_in_a_batch(backend: str, call: Call) -> None:
    def body(rank: Rank) -> None:
        problem = Problem(4, 2, tokens=64, num_topk=6, hidden=40)
        buffer = ex.make_buffer(rank, problem)
        tokens = problems.tokens_of(problem)[rank.index]
        factors = torch.rand(8, generator=problems.generator(2)) + 0.5

        def forward(first: int, last: int) -> torch.Tensor:
            x, ids = tokens.x[first:last], tokens.topk_idx[first:last]
            rows, local, _, handle, _ = buffer.dispatch(
                x.contiguous(), ids.contiguous(), num_experts=8, do_expand=call.do_expand
            )
            if call.do_expand:
                counts = handle.num_unaligned_recv_tokens_per_expert
                factor = factors[2 * rank.index :][:2].repeat_interleave(counts)
            else:
                mine = torch.where(local >= 0, factors[(local + 2 * rank.index).clamp(min=0)], 0.0)
                factor = mine.sum(dim=1)
            return buffer.combine((rows * factor[:, None]).bfloat16(), handle)[0]

        batch = forward(0, 64)
        for token in (0, 17, 63):
            alone = forward(token, token + 1)
            ex.check_same(f"token {token}", alone, batch[token : token + 1], rank.index)
        buffer.destroy()

    run_threads(4, body, num_domains=2)


@pytest.mark.parametrize("position", range(4))
def test_c149_every_byte_of_a_packed_scale_arrives_in_its_place(
    backend: str, position: int
) -> None:
    """One exponent of four carries the token's number; the rows are de-quantised on arrival."""

    def body(rank: Rank) -> None:
        tokens = 24
        exponents = torch.full((tokens, 4), 127, dtype=torch.uint8)
        exponents[:, position] = torch.arange(tokens, dtype=torch.uint8) + 100
        data = torch.ones(tokens, 512).to(torch.float8_e4m3fn)
        scales = exponents.view(torch.int32)
        ids = torch.arange(tokens)[:, None] % 4
        buffer = ex.make_buffer(rank, Problem(4, hidden=512), num_max_tokens_per_rank=tokens)
        for tma in (False, True):
            (x, sf), _, _, handle, _ = buffer.dispatch(
                (data, scales), ids, num_experts=4, use_tma_aligned_col_major_sf=tma
            )
            assert sf.dtype is torch.int32
            token = handle.recv_src_metadata[:, 0] % tokens
            arrived = sf.flatten().clone().view(torch.uint8).reshape(-1, 4)
            values = x.float() * (2.0 ** (arrived.float() - 127)).repeat_interleave(128, dim=1)
            wanted = torch.ones(len(x), 4)
            wanted[:, position] = 2.0 ** (token + 100 - 127).float()
            assert torch.equal(values, wanted.repeat_interleave(128, dim=1))
        buffer.destroy()

    run_threads(4, body)


def test_c151_scales_keep_their_type(backend: str) -> None:
    def body(rank: Rank) -> None:
        for sf_dtype, dtype in (("fp32", torch.float32), ("ue8m0", torch.int32)):
            problem = Problem(2, hidden=128, dtype="fp8", sf_dtype=sf_dtype, num_sf=1)
            buffer = ex.make_buffer(rank, problem)
            received = ex.check_dispatch(buffer, rank, problem, Call(tma_sf=True))[0]
            assert received[1].dtype is dtype
            buffer.destroy()

    run_threads(2, body)


@pytest.mark.parametrize("call", BOTH, ids=BOTH_IDS)
def test_c152_nan_and_infinity_stay_in_their_row(backend: str, call: Call) -> None:
    def body(rank: Rank) -> None:
        x = torch.ones(5, 16, dtype=torch.bfloat16)
        x[0], x[1, 3], x[2, 5], x[3, 7] = 0.0, torch.nan, torch.inf, -torch.inf
        ids = torch.tensor([[0, 3], [1, 2], [3, 0], [2, 1], [0, 1]])
        buffer = ex.make_buffer(rank, Problem(hidden=16))
        rows, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=4, do_expand=call.do_expand)
        combined = buffer.combine(rows, handle)[0]
        # Compact rows come back once a rank: token 4 has both its experts on rank 0.
        ranks_of_token_4 = 2 if call.do_expand else 1
        wanted = x * torch.tensor([2, 2, 2, 2, ranks_of_token_4])[:, None]
        ex.check_same("combined_x", combined, wanted.bfloat16(), rank.index)
        buffer.destroy()

    run_threads(2, body)


def test_c155_weights_stay_float32_to_the_end(backend: str) -> None:
    def body(rank: Rank) -> None:
        weights = torch.full((3, 8), 1 / 3) + torch.arange(24).reshape(3, 8) * 2.0**-26
        ids = torch.arange(8).repeat(3, 1)
        x = torch.ones(3, 8, dtype=torch.bfloat16)
        for do_expand in (False, True):
            buffer = ex.make_buffer(rank, Problem(hidden=8))
            rows, _, row_weights, handle, _ = buffer.dispatch(
                x, ids, weights, num_experts=8, do_expand=do_expand
            )
            assert row_weights.dtype is torch.float32
            returned = buffer.combine(rows, handle, topk_weights=row_weights)[1]
            ex.check_same("weights", returned, weights, rank.index)
            buffer.destroy()

    run_threads(2, body)


# --- order of calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_domains", [1, 2])
def test_c014_c017_a_delayed_rank_changes_nothing(run: Any, backend: str, num_domains: int) -> None:  # noqa: ANN401
    """Back to back, without barriers, one rank late at random; the routing of a step repeats."""
    run(4, exchange_with_delays, num_domains=num_domains)


def exchange_with_delays(rank: Rank) -> None:
    shape = Problem(4, rank.num_domains, tokens=(8, 3, 0, 5), num_experts=16, hidden=16)
    buffer = ex.make_buffer(rank, shape)
    expected = []
    for seed in range(3):
        exchange = problems.exchange_of(shape.rerouted(seed))
        rows = [oracle.dispatch(exchange, r).x for r in range(4)]
        combined = oracle.combine(exchange, rank.index, rows)
        arguments = ex.dispatch_arguments(exchange.tokens[rank.index], exchange, Call())
        expected.append((arguments, rows[rank.index], combined))
    for step in range(150):
        arguments, rows, combined = expected[step // 50]
        late = (step * 2654435761 >> 7) % 4
        if rank.index == late:
            time.sleep(0.002)
        x, _, _, handle, _ = buffer.dispatch(**arguments)
        ex.check_same(f"recv_x of step {step}", x, rows, rank.index)
        if rank.index == (late + 1) % 4:
            time.sleep(0.001)
        output = buffer.combine(x, handle)[0]
        ex.check_same(f"combined_x of step {step}", output, combined, rank.index)
    buffer.destroy()


@pytest.mark.parametrize("order", ["1212", "1221", "11221"], ids=str)
@pytest.mark.parametrize("call", BOTH, ids=BOTH_IDS)
def test_c015_two_dispatches_may_be_combined_in_any_order(
    backend: str, order: str, call: Call
) -> None:
    def body(rank: Rank) -> None:
        cases = {"1": Problem(3, num_experts=6), "2": Problem(3, num_experts=6, seed=5)}
        buffer = ex.make_buffer(rank, cases["1"])
        handles: dict[str, Any] = {}
        for name in order:
            if name not in handles:
                handles[name] = ex.check_dispatch(buffer, rank, cases[name], call)[3]
        for name in order:
            ex.check_combine(buffer, rank, cases[name], call, handles[name])
        buffer.destroy()

    run_threads(3, body)


def test_c020_row_sizes_and_capacities_may_alternate_on_one_buffer(backend: str) -> None:
    def body(rank: Rank) -> None:
        wide = Problem(2, tokens=20, num_max_tokens=128, hidden=512)
        narrow = Problem(2, tokens=(9, 31), num_max_tokens=256, hidden=64, dtype="fp8", num_sf=5)
        buffer = ex.make_buffer(rank, wide)
        for turn in range(6):
            problem = (wide, narrow)[turn % 2].rerouted(turn)
            handle = ex.check_dispatch(buffer, rank, problem, BOTH[turn // 2 % 2])[3]
            ex.check_combine(buffer, rank, problem, BOTH[turn // 2 % 2], handle)
        buffer.destroy()

    run_threads(2, body)


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", REAL_HIDDEN_SIZES)
def test_c057_hidden_sizes_of_real_models_work_over_two_domains(backend: str, hidden: int) -> None:
    round_trip(
        Problem(16, 2, tokens=2, hidden=hidden, num_topk=8, num_experts=32), Call(do_expand=True)
    )


@pytest.mark.parametrize("sf", [("fp32", 23), ("ue8m0", 6)], ids=["fp32", "packed"])
def test_c059_hidden_sizes_that_are_no_multiple_of_a_pack_work(
    backend: str, sf: tuple[str, int]
) -> None:
    problem = Problem(2, hidden=2944, dtype="fp8", sf_dtype=sf[0], num_sf=sf[1], sf_layout="tma")
    round_trip(problem, Call(tma_sf=True, do_expand=True))


@pytest.mark.parametrize("num_sf", [1, 3, 5, 9])
@pytest.mark.parametrize("hidden", [2, 4, 24])
def test_c060_c061_rows_and_scales_of_odd_sizes_do_not_meet(
    backend: str, hidden: int, num_sf: int
) -> None:
    problem = Problem(2, tokens=(7, 5), num_max_tokens=7, hidden=hidden, dtype="fp8", num_sf=num_sf)
    round_trip(problem, Call(do_expand=True, alignment=3, zero_padding=True))


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(3, 256), (2, 7), (2, 1)])
def test_c064_experts_that_do_not_divide_are_refused_with_the_nearest_number(
    backend: str, num_ranks: int, num_experts: int
) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, Problem(num_ranks, hidden=8))
        x, ids = torch.ones(1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)
        with pytest.raises((ValueError, RuntimeError), match="num_experts") as caught:
            buffer.dispatch(x, ids, num_experts=num_experts)
        low = num_experts // num_ranks * num_ranks
        assert any(str(near) in str(caught.value) for near in (low, low + num_ranks) if near > 0)
        buffer.destroy()

    run_threads(num_ranks, body)


@pytest.mark.parametrize("num_local_experts", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 3, 5, 6, 7])
def test_c065_c066_every_number_of_ranks_and_experts_works(
    backend: str, num_ranks: int, num_local_experts: int
) -> None:
    problem = Problem(num_ranks, tokens=5, num_topk=3, num_experts=num_ranks * num_local_experts)
    round_trip(problem, Call(do_expand=True, alignment=2))


def test_c070_a_group_of_256_ranks_is_made_without_a_change_of_path() -> None:
    ends = deep_ep.comm.thread_groups(256, 32)
    assert [end.rank() for end in ends] == list(range(256))
    assert all(end.size() == 256 for end in ends)


# --- settings -------------------------------------------------------------------------------------


def test_c041_c045_c052_the_hint_counts_in_64_bits_and_knows_about_scales(backend: str) -> None:
    def body(rank: Rank) -> None:
        def hint(tokens: int, hidden: int, topk: int = 0, use_fp8: bool = False) -> int:
            return EPBuffer.get_buffer_size_hint(rank.group, tokens, hidden, topk, use_fp8)

        assert hint(1 << 20, 16384) >= (1 << 20) * 16384 * 2  # more than 32 bits can say
        # Room for scales: one of 4 bytes for each 32 elements.
        rows = 2 * 4096
        assert hint(4096, 7168, 8, True) >= rows * (7168 + 7168 // 8)
        assert hint(4096, 7168, 0) == hint(4096, 7168, 32) > hint(4096, 7168, 8)

    run_threads(2, body)


def test_c042_the_group_is_checked_against_the_experts_of_each_call(backend: str) -> None:
    """A group of 4 made by mistake where 3 share the experts."""

    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, Problem(4, hidden=8))
        x, ids = torch.ones(1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)
        with pytest.raises((ValueError, RuntimeError), match=r"4\s+ranks"):
            buffer.dispatch(x, ids, num_experts=9)
        buffer.destroy()

    run_threads(4, body)


def test_c077_an_impossible_number_of_sms_is_refused_at_one_place(backend: str) -> None:
    def body(rank: Rank) -> None:
        problem = Problem(2, hidden=8)
        buffer = ex.make_buffer(rank, problem)
        exchange = problems.exchange_of(problem)
        arguments = ex.dispatch_arguments(exchange.tokens[rank.index], exchange, Call())
        x, _, _, handle, _ = buffer.dispatch(**arguments)
        calls = [
            lambda: buffer.dispatch(**arguments | {"num_sms": -1}),
            lambda: buffer.dispatch(x=arguments["x"], handle=handle, num_sms=-1),
            lambda: buffer.combine(x, handle, num_sms=-1),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="num_sms"):
                call()
        ex.check_dispatch(buffer, rank, problem, Call())
        buffer.destroy()

    run_threads(2, body)


@pytest.mark.parametrize("num_qps", [-1, 1000])
def test_c097_conflicting_numbers_of_queues_are_refused(backend: str, num_qps: int) -> None:
    def body(rank: Rank) -> None:
        problem = Problem(2, hidden=8)
        buffer = ex.make_buffer(rank, problem, num_allocated_qps=24)
        exchange = problems.exchange_of(problem)
        arguments = ex.dispatch_arguments(exchange.tokens[rank.index], exchange, Call())
        with pytest.raises(ValueError, match="num_qps"):
            buffer.dispatch(**arguments | {"num_sms": 52, "num_qps": num_qps})
        ex.check_dispatch(buffer, rank, problem, Call())
        buffer.destroy()

    run_threads(2, body)
