"""Ranks that die, stop, raise, never call, or disagree: everybody else hears of it, and soon.

Tests that kill or stop ranks start processes of their own; the others use threads.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import exchange as ex
import problem as problems
from exchange import Call
from problem import Problem
from ranks import Rank, fresh_ranks, run_threads

LIMIT_SECS = "3"
LIMIT = {"EP_TIMEOUT_SECS": LIMIT_SECS}
PROBLEM = Problem(num_ranks=4, tokens=(6, 3, 0, 9), hidden=64, routing="masked")


@dataclass
class Failure:
    """What a call raised, in a form that travels between processes."""

    kind: str
    text: str


def failure_of(call: Callable[[], object]) -> Failure | None:
    try:
        call()
    except Exception as error:
        kinds = [k.__name__ for k in (TimeoutError, OSError, ValueError, RuntimeError)]
        names = [k.__name__ for k in type(error).__mro__]
        return Failure(next((k for k in kinds if k in names), names[0]), str(error))
    return None


def work_until_it_fails(rank: Rank, *, pause_at: int = -1) -> tuple[Failure, Failure, Failure]:
    """Dispatches and combines for ever; returns the error, and what later calls raise."""
    buffer = ex.make_buffer(rank, PROBLEM)
    exchange = problems.exchange_of(PROBLEM)
    arguments = ex.dispatch_arguments(exchange.tokens[rank.index], exchange, Call())
    x, _, _, handle, _ = buffer.dispatch(**arguments)

    def work() -> None:
        step = 0
        while True:
            if step == pause_at:
                rank.report("paused")
                signal.pause()
            x, _, _, handle, _ = buffer.dispatch(**arguments)
            buffer.combine(x, handle)
            step += 1
            if step == 20:
                rank.report("working")

    first = failure_of(work)
    later = failure_of(lambda: buffer.dispatch(**arguments))
    combined = failure_of(lambda: buffer.combine(x, handle))
    buffer.destroy()
    return first, later, combined


def pause_in_step_7(rank: Rank) -> object:
    return work_until_it_fails(rank, pause_at=7 if rank.index == 3 else -1)


def check_all_name_rank_3(outcomes: list[Any]) -> None:
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        first, later, combined = outcome.value
        assert first.kind in ("TimeoutError", "RuntimeError"), first
        assert "rank 3" in first.text or "ranks 3" in first.text, first
        assert "dispatch" in first.text or "combine" in first.text, first
        assert later is not None
        assert later.kind == combined.kind == first.kind
        assert later.text == combined.text == first.text


# --- a rank that is gone or stopped ---------------------------------------------------------------


@pytest.fixture
def leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What has appeared in /dev/shm and in the temporary directory since the test began."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shm = Path("/dev/shm")
    before = set(shm.iterdir()) if shm.is_dir() else set()

    def look() -> list[str]:
        now = set(shm.iterdir()) if shm.is_dir() else set()
        found = [str(p) for p in now - before if not p.name.startswith(("torch_", "sem."))]
        return found + [str(p) for p in tmp_path.iterdir() if not p.name.startswith("ranks-")]

    return look


def test_a_rank_killed_while_all_work_is_named_and_leaves_nothing_behind(
    backend: str, leftovers: Callable[[], list[str]]
) -> None:
    """kill -9 in the midst of dispatch and combine."""
    with fresh_ranks(4, LIMIT) as ranks:
        ranks.start(4, work_until_it_fails)
        assert ranks.next_report(3) == "working"
        os.kill(ranks.pid(3), signal.SIGKILL)
        check_all_name_rank_3(ranks.finish([0, 1, 2], timeout=20))
        codes = ranks.close()
    assert codes[:3] == [0, 0, 0]
    assert leftovers() == []


def test_a_rank_killed_before_it_calls_is_named(backend: str) -> None:
    """The others already wait; the rank is known to be gone, so they need not time out."""
    with fresh_ranks(4, {"EP_TIMEOUT_SECS": "40"}) as ranks:
        ranks.start(4, pause_in_step_7)
        assert ranks.next_report(3) == "paused"
        os.kill(ranks.pid(3), signal.SIGKILL)
        outcomes = ranks.finish([0, 1, 2], timeout=30)
        check_all_name_rank_3(outcomes)
        assert {o.value[0].kind for o in outcomes} == {"RuntimeError"}
        assert ranks.close()[:3] == [0, 0, 0]


def test_everybody_killed_leaves_nothing_behind(
    backend: str, leftovers: Callable[[], list[str]]
) -> None:
    with fresh_ranks(4, LIMIT) as ranks:
        ranks.start(4, work_until_it_fails)
        for rank in range(4):
            assert ranks.next_report(rank) == "working"
        for rank in range(4):
            os.kill(ranks.pid(rank), signal.SIGKILL)
    assert leftovers() == []


def test_a_stopped_rank_is_named_by_a_timeout_and_hears_of_it_later(backend: str) -> None:
    with fresh_ranks(4, LIMIT) as ranks:
        ranks.start(4, work_until_it_fails)
        assert ranks.next_report(3) == "working"
        os.kill(ranks.pid(3), signal.SIGSTOP)
        outcomes = ranks.finish([0, 1, 2], timeout=20)
        check_all_name_rank_3(outcomes)
        assert {o.value[0].kind for o in outcomes} == {"TimeoutError"}
        os.kill(ranks.pid(3), signal.SIGCONT)
        stopped = ranks.finish([3], timeout=20)[0]
        assert stopped.error is None, stopped.error
        assert stopped.value[0].kind in ("TimeoutError", "RuntimeError")
        assert ranks.close() == [0, 0, 0, 0]


def test_a_rank_that_never_calls_is_named_with_operation_and_call_number(backend: str) -> None:
    """C006: three ranks stay away from the third dispatch."""
    first, later = run_threads(4, stay_away)[0]
    assert first.kind == "TimeoutError"
    assert "dispatch" in first.text
    assert "5" in first.text  # the call after two dispatches and two combines
    assert all(str(rank) in first.text for rank in (1, 2, 3))
    assert later == first


def stay_away(rank: Rank) -> tuple[Failure, Failure] | None:
    buffer = ex.make_buffer(rank, PROBLEM, num_cpu_timeout_secs=2)
    for _ in range(2):
        handle = ex.check_dispatch(buffer, rank, PROBLEM, Call())[3]
        ex.check_combine(buffer, rank, PROBLEM, Call(), handle)
    result = None
    if rank.index == 0:
        exchange = problems.exchange_of(PROBLEM)
        arguments = ex.dispatch_arguments(exchange.tokens[0], exchange, Call())
        result = (
            failure_of(lambda: buffer.dispatch(**arguments)),
            failure_of(lambda: buffer.dispatch(**arguments)),
        )
    rank.barrier()
    return result


def test_a_rank_that_raises_and_leaves_is_named_at_once(run: Any, backend: str) -> None:  # noqa: ANN401
    """C086: between dispatch and combine; the limit is far longer than the test may take."""
    values = run(4, raise_and_leave, timeout=25)  # the limit of the buffer is longer
    for failure in values[:2] + values[3:]:
        assert failure.kind == "RuntimeError", failure
        assert "rank 2" in failure.text
        assert "combine" in failure.text


def raise_and_leave(rank: Rank) -> Failure | None:
    def step() -> None:
        buffer = ex.make_buffer(rank, PROBLEM, explicitly_destroy=False)
        x, _, _, handle = ex.check_dispatch(buffer, rank, PROBLEM, Call())
        if rank.index == 2:
            raise KeyError("a bug of the model")
        buffer.combine(x, handle)

    failure = failure_of(step)
    return failure if rank.index != 2 else None


@pytest.mark.parametrize("seconds", [0.5, 1])
def test_the_limit_is_also_an_argument(backend: str, seconds: float) -> None:
    """C081: a rank that is late by more than the limit."""
    failure = run_threads(2, wait_with_limit, seconds)[0]
    assert failure.kind == "TimeoutError"
    assert "rank 1" in failure.text or "ranks 1" in failure.text


def wait_with_limit(rank: Rank, seconds: float) -> Failure | None:
    problem = Problem(num_ranks=2)
    buffer = ex.make_buffer(rank, problem, num_cpu_timeout_secs=seconds)
    failure = None
    if rank.index == 0:
        failure = failure_of(lambda: ex.check_dispatch(buffer, rank, problem, Call()))
    rank.barrier()
    return failure


def test_a_rank_may_be_late_within_the_limit(backend: str) -> None:
    run_threads(2, come_late)


def come_late(rank: Rank) -> None:
    import time

    problem = Problem(num_ranks=2)
    buffer = ex.make_buffer(rank, problem, num_cpu_timeout_secs=10)
    for turn in range(3):
        if rank.index == turn % 2:
            time.sleep(0.3)
        handle = ex.check_dispatch(buffer, rank, problem.rerouted(turn), Call())[3]
        if rank.index == (turn + 1) % 2:
            time.sleep(0.3)
        ex.check_combine(buffer, rank, problem.rerouted(turn), Call(), handle)
    buffer.destroy()


# --- ranks that disagree at construction ----------------------------------------------------------

DISAGREEMENTS = {
    "num_max_tokens_per_rank": (8, 16),
    "hidden": (64, 128),
    "num_topk": (4, 8),
    "use_fp8_dispatch": (False, True),
    "allow_hybrid_mode": (True, False),
    "allow_multiple_reduction": (True, False),
    "num_bytes": (4 << 20, 8 << 20),
    "deterministic": (False, True),
    "num_allocated_qps": (4, 8),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_constructor_arguments_that_differ_are_listed(run: Any, backend: str, name: str) -> None:  # noqa: ANN401
    """C039: with the value of each rank that differs; and a second attempt works."""
    failures = run(3, construct_differently, name)
    assert len({f.text for f in failures}) == 1
    for failure in failures:
        assert failure.kind == "ValueError"
        assert name in failure.text
        assert "2" in failure.text  # the rank
        usual, other = DISAGREEMENTS[name]
        shown = failure.text.lower()
        assert str(int(usual)) in shown or str(usual).lower() in shown
        assert str(int(other)) in shown or str(other).lower() in shown


def construct_differently(rank: Rank, name: str) -> Failure | None:
    problem = Problem(num_ranks=3, num_experts=6)
    value = DISAGREEMENTS[name][rank.index == 2]
    failure = failure_of(lambda: ex.make_buffer(rank, problem, **{name: value}))
    ex.check_round_trip(rank, problem, Call())
    return failure


# --- bad arguments on one rank --------------------------------------------------------------------


def bad_dispatches(tokens: Any) -> dict[str, dict[str, Any]]:  # noqa: ANN401
    """Changes to the arguments of dispatch that break a rule, on one rank alone."""
    count = len(tokens.x)
    too_large = tokens.topk_idx.clone()
    too_large[0, 0] = 8
    return {
        "id_of_no_expert": {"topk_idx": too_large},
        "id_far_off": {"topk_idx": too_large + (1 << 40)},
        "more_tokens_than_capacity": {
            "x": torch.zeros(50, 64, dtype=torch.bfloat16),
            "topk_idx": torch.zeros(50, 4, dtype=torch.int64),
            "topk_weights": None,
        },
        "too_few_rows_of_ids": {"topk_idx": tokens.topk_idx[: count - 1]},
        "ids_of_16_bits": {"topk_idx": tokens.topk_idx.to(torch.int16)},
        "ids_of_one_dimension": {"topk_idx": tokens.topk_idx[:, 0].contiguous()},
        "x_of_one_dimension": {"x": tokens.x[:, 0].contiguous()},
        "x_that_is_not_contiguous": {"x": tokens.x.repeat(1, 2)[:, ::2]},
        "x_of_float16": {"x": tokens.x.half()},
        "weights_of_bfloat16": {"topk_weights": tokens.topk_weights.bfloat16()},
        "weights_of_another_shape": {"topk_weights": tokens.topk_weights[:, :2].contiguous()},
        "experts_that_do_not_divide": {"num_experts": 9},
        "other_number_of_experts": {"num_experts": 16},
        "no_experts": {"num_experts": 0},
        "other_capacity": {"num_max_tokens_per_rank": 12},
        "alignment_of_zero": {"expert_alignment": 0},
        "other_alignment": {"expert_alignment": 8},
        "zero_padding_of_compact_rows": {"do_zero_padding": True},
        "negative_sms": {"num_sms": -2},
        "scales_of_another_length": {
            "x": (tokens.x.to(torch.float8_e4m3fn), torch.zeros(count + 1, 1))
        },
        "another_dtype_of_x": {"x": (tokens.x.to(torch.float8_e4m3fn), torch.zeros(count, 1))},
        "another_hidden": {"x": tokens.x.repeat(1, 2)},
        "another_top_k": {
            "topk_idx": tokens.topk_idx[:, :2].contiguous(),
            "topk_weights": None,
        },
        "other_layout": {"do_expand": True},
        "weights_missing": {"topk_weights": None},
        "statistics_of_another_length": {
            "cumulative_local_expert_recv_stats": torch.zeros(7, dtype=torch.int32)
        },
    }


BAD_DISPATCHES = list(bad_dispatches(problems.tokens_of(PROBLEM)[1]))


@pytest.mark.parametrize("name", BAD_DISPATCHES)
def test_a_bad_dispatch_on_one_rank_fails_on_all_and_the_buffer_goes_on(
    backend: str, name: str
) -> None:
    """C035, C072 and others: refused before any effect, the same text everywhere."""
    check_refused(run_threads(4, dispatch_badly, name))


def dispatch_badly(rank: Rank, name: str) -> Failure | None:
    buffer = ex.make_buffer(rank, PROBLEM, num_cpu_timeout_secs=5)
    exchange = problems.exchange_of(PROBLEM)
    tokens = exchange.tokens[rank.index]
    arguments = ex.dispatch_arguments(tokens, exchange, Call())
    if rank.index == 1:
        arguments |= bad_dispatches(tokens)[name]
    failure = failure_of(lambda: buffer.dispatch(**arguments))
    go_on(buffer, rank)
    return failure


def check_refused(failures: list[Failure | None]) -> None:
    assert all(failure is not None for failure in failures), failures
    assert failures[1].kind == "ValueError"
    for failure in failures:
        assert failure.kind in ("ValueError", "RuntimeError"), failure
        assert failures[1].text in failure.text or failure.text in failures[1].text, failures


def go_on(buffer: Any, rank: Rank) -> None:  # noqa: ANN401
    handle = ex.check_dispatch(buffer, rank, PROBLEM.rerouted(4), Call())[3]
    ex.check_combine(buffer, rank, PROBLEM.rerouted(4), Call(), handle)
    buffer.destroy()


def bad_combines(x: torch.Tensor, weights: torch.Tensor) -> dict[str, dict[str, Any]]:
    bias = torch.zeros(3, 64, dtype=torch.bfloat16)
    return {
        "too_few_rows": {"x": x[:-1]},
        "too_many_rows": {"x": torch.cat([x, x])},
        "x_of_float32": {"x": x.float()},
        "x_of_one_dimension": {"x": x[:, 0].contiguous()},
        "x_that_is_not_contiguous": {"x": x.repeat(1, 2)[:, ::2]},
        "weights_of_another_shape": {"topk_weights": weights[:, :3].contiguous()},
        "weights_of_another_length": {"topk_weights": weights[:-1]},
        "bias_of_another_shape": {"bias": bias[:, :8].contiguous()},
        "bias_of_float32": {"bias": bias.float()},
        "another_hidden": {"x": x.repeat(1, 2)},
        "weights_missing": {"topk_weights": None},
    }


BAD_COMBINES = list(bad_combines(torch.zeros(2, 64), torch.zeros(2, 4)))


@pytest.mark.parametrize("name", BAD_COMBINES)
def test_a_bad_combine_on_one_rank_fails_on_all_and_the_buffer_goes_on(
    backend: str, name: str
) -> None:
    """C075: routing comes from the handle alone, so what doesn't fit it is refused."""
    check_refused(run_threads(4, combine_badly, name))


def combine_badly(rank: Rank, name: str) -> Failure | None:
    buffer = ex.make_buffer(rank, PROBLEM, num_cpu_timeout_secs=5)
    x, _, weights, handle = ex.check_dispatch(buffer, rank, PROBLEM, Call())
    arguments: dict[str, Any] = {"x": x, "topk_weights": weights}
    if rank.index == 1:
        arguments |= bad_combines(x, weights)[name]
    failure = failure_of(lambda: buffer.combine(handle=handle, **arguments))
    go_on(buffer, rank)
    return failure


def bad_cached(tokens: Any) -> dict[str, dict[str, Any]]:  # noqa: ANN401
    return {
        "ids_as_well": {"topk_idx": tokens.topk_idx},
        "other_layout": {"do_expand": True},
        "other_number_of_tokens": {"x": torch.cat([tokens.x, tokens.x])},
        "other_number_of_experts": {"num_experts": 16},
        "other_capacity": {"num_max_tokens_per_rank": 12},
        "other_alignment": {"expert_alignment": 8},
        "statistics": {"cumulative_local_expert_recv_stats": torch.zeros(2, dtype=torch.int32)},
        "exact_shapes": {"do_cpu_sync": True},
        "a_copy_of_the_handle": {"do_handle_copy": True},
    }


BAD_CACHED = list(bad_cached(problems.tokens_of(PROBLEM)[1]))


@pytest.mark.parametrize("name", BAD_CACHED)
def test_a_bad_cached_dispatch_fails_on_all_and_the_buffer_goes_on(backend: str, name: str) -> None:
    check_refused(run_threads(4, repeat_badly, name))


def repeat_badly(rank: Rank, name: str) -> Failure | None:
    buffer = ex.make_buffer(rank, PROBLEM, num_cpu_timeout_secs=5)
    handle = ex.check_dispatch(buffer, rank, PROBLEM, Call())[3]
    tokens = problems.tokens_of(PROBLEM)[rank.index]
    arguments: dict[str, Any] = {"x": tokens.x, "handle": handle}
    if rank.index == 1:
        arguments |= bad_cached(tokens)[name]
    failure = failure_of(lambda: buffer.dispatch(**arguments))
    go_on(buffer, rank)
    return failure


def test_ranks_that_call_different_operations_are_told(backend: str) -> None:
    failures = run_threads(2, call_something_else)
    assert all(failure is not None for failure in failures)
    assert {failure.kind for failure in failures} <= {"ValueError", "RuntimeError", "TimeoutError"}
    text = " ".join(failure.text for failure in failures)
    assert "dispatch" in text
    assert "combine" in text


def call_something_else(rank: Rank) -> Failure | None:
    problem = Problem(num_ranks=2)
    buffer = ex.make_buffer(rank, problem, num_cpu_timeout_secs=2)
    x, _, _, handle = ex.check_dispatch(buffer, rank, problem, Call())
    if rank.index == 0:
        return failure_of(lambda: buffer.combine(x, handle))
    return failure_of(lambda: ex.check_dispatch(buffer, rank, problem, Call()))


def test_the_harness_reports_each_rank_that_failed_and_how() -> None:
    """The tests of this directory can fail: a wrong rank, a dead one and one that hangs."""
    with fresh_ranks(3) as ranks:
        ranks.start(3, fail_in_your_own_way)
        outcomes = ranks.finish(timeout=30, grace=2)
        assert outcomes[0].died
        assert "wrong answer" in (outcomes[1].error or "")
        assert "has not come back" in (outcomes[2].error or "")
        assert not ranks.is_usable()


def fail_in_your_own_way(rank: Rank) -> None:
    if rank.index == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.index == 2:
        signal.pause()
    raise AssertionError("wrong answer")
