"""Events: asynchronous and deferred calls, chains of them, and waiting from anywhere."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import exchange as ex
import oracle
import problem as problems
from deep_ep import EPBuffer, EventHandle, EventOverlap
from exchange import Call
from problem import Problem
from ranks import Rank, own_stream, run_threads

PROBLEM = Problem(num_ranks=3, tokens=(9, 0, 5), hidden=48, num_experts=6, routing="masked")


def arguments_of(rank: Rank, problem: Problem = PROBLEM, **options: object) -> dict[str, Any]:
    exchange = problems.exchange_of(problem)
    return ex.dispatch_arguments(exchange.tokens[rank.index], exchange, Call()) | options


def expected_of(rank: Rank, problem: Problem = PROBLEM) -> torch.Tensor:
    return oracle.dispatch(problems.exchange_of(problem), rank.index).x


def test_a_synchronous_call_has_no_event_and_waiting_for_it_does_nothing(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        x, _, _, handle, event = buffer.dispatch(**arguments_of(rank))
        assert isinstance(event, EventOverlap)
        assert event.event is None
        event.current_stream_wait()
        event.wait()
        combined, _, event = buffer.combine(x, handle)
        assert event.event is None
        with event:
            pass
        buffer.destroy()

    run_threads(3, body)


@pytest.mark.parametrize("allocate", [False, True], ids=["caller_stream", "comm_stream"])
def test_an_asynchronous_call_may_be_waited_for_any_number_of_times(
    backend: str, allocate: bool
) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        options = {"async_with_compute_stream": True, "allocate_on_comm_stream": allocate}
        x, _, _, handle, event = buffer.dispatch(**arguments_of(rank) | options)
        assert isinstance(event.event, EventHandle)
        for wait in (event.current_stream_wait, event.wait, event.event.current_stream_wait):
            wait()
        ex.check_same("recv_x", x, expected_of(rank), rank.index)
        event.current_stream_wait(release_handle=True)
        assert event.event is None
        event.wait()
        buffer.destroy()

    run_threads(3, body)


PREVIOUS = {
    "none": lambda: None,
    "handle": EventHandle,
    "overlap_of_handle": lambda: EventOverlap(EventHandle()),
    "empty_overlap": lambda: EventOverlap(None),
    "capture": EPBuffer.capture,
    "any_object_with_an_event": lambda: SimpleNamespace(event=None),
}


@pytest.mark.parametrize("make", PREVIOUS.values(), ids=PREVIOUS.keys())
def test_every_kind_of_previous_event_is_taken(backend: str, make: Any) -> None:  # noqa: ANN401
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        options = {"previous_event": make(), "allocate_on_comm_stream": True}
        x, _, _, handle, _ = buffer.dispatch(**arguments_of(rank, **options))
        ex.check_same("recv_x", x, expected_of(rank), rank.index)
        buffer.combine(x, handle, **options)
        buffer.destroy()

    run_threads(3, body)


def test_an_event_may_be_made_empty_and_filled_later() -> None:
    event = EventOverlap()
    assert event.event is None
    event.current_stream_wait()
    event.event = EventHandle()
    event.current_stream_wait()


def test_a_hook_runs_once_at_the_first_wait() -> None:
    event, calls = EventOverlap(EventHandle()), []
    event.register_hook_after_wait(lambda: calls.append(1) or "result")
    with pytest.raises(AssertionError):
        event.register_hook_after_wait(lambda: None)
    assert calls == []
    assert event.wait() == "result"
    assert event.current_stream_wait() == "result"
    assert calls == [1]


def test_with_waits_at_its_end_also_when_the_body_raises() -> None:
    event, calls = EventOverlap(EventHandle()), []
    event.register_hook_after_wait(lambda: calls.append(1))

    def body() -> None:
        with event:
            assert calls == []
            raise KeyError("body")

    with pytest.raises(KeyError):
        body()
    assert calls == [1]
    with event(release_handle=True):
        assert event.event is not None
    assert event.event is None


def test_deferred_results_are_the_same_objects_at_every_wait(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        options = {"async_with_compute_stream": True, "defer_epilogue": True}
        event = buffer.dispatch(**arguments_of(rank) | options)
        with event:
            pass
        first, again = event.wait(), event.current_stream_wait()
        assert len(first) == 4
        assert all(a is b for a, b in zip(first, again, strict=True))
        ex.check_same("recv_x", first[0], expected_of(rank), rank.index)
        event = buffer.combine(first[0], first[3], **options)
        first, again = event.wait(), event.wait()
        assert len(first) == 2
        assert all(a is b for a, b in zip(first, again, strict=True))
        buffer.destroy()

    run_threads(3, body)


def test_a_deferred_combine_reads_a_bias_that_is_written_before_the_wait(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        x, _, _, handle, _ = buffer.dispatch(**arguments_of(rank))
        tokens = PROBLEM.num_tokens[rank.index]
        bias = ex.put(torch.zeros(tokens, PROBLEM.hidden, dtype=torch.bfloat16))
        options = {"async_with_compute_stream": True, "defer_epilogue": True, "bias": bias}
        event = buffer.combine(x, handle, **options)
        bias.copy_(problems.make_bias(PROBLEM, rank.index, 1)[0])
        combined, _ = event.wait()
        exchange = problems.exchange_of(PROBLEM)
        rows = [oracle.dispatch(exchange, r).x for r in range(rank.size)]
        expected = oracle.combine(exchange, rank.index, rows, bias=[bias.cpu()])
        ex.check_same("combined_x", combined, expected, rank.index)
        buffer.destroy()

    run_threads(3, body)


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_deferring_needs_an_asynchronous_call(backend: str, operation: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        x, _, _, handle, _ = buffer.dispatch(**arguments_of(rank))
        arguments = arguments_of(rank) if operation == "dispatch" else {"x": x, "handle": handle}
        with pytest.raises(ValueError, match="defer_epilogue"):
            getattr(buffer, operation)(**arguments, defer_epilogue=True)
        ex.check_dispatch(buffer, rank, PROBLEM, Call())
        buffer.destroy()

    run_threads(3, body)


@pytest.mark.parametrize("defer", [False, True], ids=["async", "deferred"])
def test_waiting_for_the_last_of_several_calls_is_enough(backend: str, defer: bool) -> None:
    """C021: a batch in four chunks, one event kept. C016: several deferred calls at once."""

    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        chunks = [PROBLEM.rerouted(seed) for seed in range(4)]
        options = {"async_with_compute_stream": True, "defer_epilogue": defer}
        calls = [buffer.dispatch(**arguments_of(rank, c) | options) for c in chunks]
        if defer:
            results = [event.wait() for event in reversed(calls)][::-1]
        else:
            calls[-1][-1].current_stream_wait()
            results = calls
        for chunk, result in zip(chunks, results, strict=True):
            ex.check_same("recv_x", result[0], expected_of(rank, chunk), rank.index)

        calls = [buffer.combine(result[0], result[3], **options) for result in results]
        if defer:
            combined = [event.wait()[0] for event in calls]
        else:
            calls[-1][-1].current_stream_wait()
            combined = [call[0] for call in calls]
        for chunk, result in zip(chunks, combined, strict=True):
            exchange = problems.exchange_of(chunk)
            rows = [oracle.dispatch(exchange, r).x for r in range(rank.size)]
            expected = oracle.combine(exchange, rank.index, rows)
            ex.check_same("combined_x", result, expected, rank.index)
        buffer.destroy()

    run_threads(3, body)


def test_calls_chained_by_events_run_one_after_the_other(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        options: dict[str, Any] = {
            "async_with_compute_stream": True,
            "allocate_on_comm_stream": True,
            "previous_event": buffer.capture(),
        }
        x, _, _, handle, event = buffer.dispatch(**arguments_of(rank) | options)
        for _ in range(3):  # each reads what the one before has written
            combined, _, event = buffer.combine(x, handle, **options | {"previous_event": event})
            x, _, _, _, event = buffer.dispatch(
                combined, handle=handle, **options | {"previous_event": event}
            )
        event.current_stream_wait()
        exchange = problems.exchange_of(PROBLEM)
        rows = [oracle.dispatch(exchange, r).x for r in range(rank.size)]
        for _ in range(3):
            sums = [oracle.combine(exchange, r, rows) for r in range(rank.size)]
            layouts = [oracle.layout_of(exchange, r, do_expand=False) for r in range(rank.size)]
            rows = [torch.stack([sums[p.source][p.token] for p in la.rows]) for la in layouts]
        ex.check_same("recv_x", x, rows[rank.index], rank.index)
        buffer.destroy()

    run_threads(3, body)


def test_an_event_may_be_waited_for_by_another_thread(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        results = buffer.dispatch(**arguments_of(rank) | {"async_with_compute_stream": True})
        waiter = threading.Thread(target=results[-1].current_stream_wait)
        waiter.start()
        waiter.join(30)
        assert not waiter.is_alive()
        ex.check_same("recv_x", results[0], expected_of(rank), rank.index)
        buffer.destroy()

    run_threads(3, body)


def test_inputs_of_an_asynchronous_call_may_be_dropped(backend: str) -> None:
    """E8, C026: the library holds on to what it still reads."""

    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        for _ in range(20):
            arguments = arguments_of(rank) | {"async_with_compute_stream": True}
            for name in ("x", "topk_idx", "topk_weights"):
                arguments[name] = arguments[name].clone()
            results = buffer.dispatch(**arguments)
            del arguments
            gc.collect(0)
            torch.full((9, PROBLEM.hidden), torch.nan, dtype=torch.bfloat16)  # reuse the memory
            results[-1].current_stream_wait()
            ex.check_same("recv_x", results[0], expected_of(rank), rank.index)
        buffer.destroy()

    run_threads(3, body)


def test_threads_take_turns_on_one_buffer(backend: str) -> None:
    """E7: dual-batch overlap calls a buffer from two threads, one after the other."""

    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        failed = []

        def one_turn(seed: int) -> None:
            try:
                with own_stream():
                    problem = PROBLEM.rerouted(seed)
                    handle = ex.check_dispatch(buffer, rank, problem, Call(mode="async"))[3]
                    ex.check_combine(buffer, rank, problem, Call(mode="async"), handle)
            except BaseException as error:
                failed.append(error)

        for seed in range(4):
            thread = threading.Thread(target=one_turn, args=(seed,))
            thread.start()
            thread.join(30)
        assert failed == []
        buffer.destroy()

    run_threads(3, body)
