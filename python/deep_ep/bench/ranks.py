"""Runs a function in N processes that form a gloo group, and ends all of them when one fails."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

# How long ranks that have not failed may take to end by themselves, so that their errors show too.
_GRACE_SECS = 1.0
# How often a wait for the ranks looks whether the user wants to stop.
_LOOK_UP_SECS = 0.5
_PR_SET_PDEATHSIG = 1


class RankError(RuntimeError):
    """A rank failed; the text says which one and why."""


@dataclass(frozen=True)
class Rank:
    """This process among the ranks.

    Attributes:
        idx: the rank.
        num_ranks: how many there are.
        num_threads: threads that this rank may keep busy, so that all ranks share the cores.
        report: sends an object to `on_report` of `run_ranks`.
    """

    idx: int
    num_ranks: int
    num_threads: int
    report: Callable[[Any], None]


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    args: Sequence[Any] = (),
    on_report: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Calls `function(rank, *args)` in `num_ranks` processes, with torch.distributed set up.

    Args:
        function: a function of a module; it and `args` are pickled.
        num_ranks: number of processes.
        args: further arguments, the same for all ranks.
        on_report: called here with the rank and each object that it reports.

    Returns:
        What the function returned, by rank.

    Raises:
        RankError: a rank raised or died. All others have been ended by then.
    """
    # A store that listens on a free port and leaves no file behind, whoever dies.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    interrupts = _Interrupts()
    try:
        for rank_idx in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(function, args, rank_idx, num_ranks, store.port, sender)
            )
            _start_without_interrupts(process)
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        results = _collect(processes, pipes, on_report, interrupts)
        for process in processes:
            process.join()
        return results
    finally:
        _end(processes)
        for pipe in pipes:
            pipe.close()
        interrupts.stop()


class _Interrupts:
    """Remembers Ctrl-C: a KeyboardInterrupt inside a destructor or a callback gets lost."""

    def __init__(self) -> None:
        self._was_hit = False
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._before = signal.signal(signal.SIGINT, self._hit)

    def _hit(self, number: int, frame: FrameType | None) -> None:
        self._was_hit = True
        raise KeyboardInterrupt

    def raise_if_hit(self) -> None:
        if self._was_hit:
            raise KeyboardInterrupt

    def stop(self) -> None:
        if self._is_main:
            signal.signal(signal.SIGINT, self._before)


def _start_without_interrupts(process: BaseProcess) -> None:
    # Ctrl-C reaches every process of the terminal: this one handles it and ends the ranks. They
    # inherit the blocked signal, so that it does not hit them while they start either.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _collect(
    processes: Sequence[BaseProcess],
    pipes: Sequence[Connection],
    on_report: Callable[[int, Any], None] | None,
    interrupts: _Interrupts,
) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    errors: list[str] = []
    waiting = {pipe: rank_idx for rank_idx, pipe in enumerate(pipes)}
    deadline = float("inf")
    while waiting and time.monotonic() < deadline:
        interrupts.raise_if_hit()
        timeout = min(_LOOK_UP_SECS, max(0.0, deadline - time.monotonic()))
        for pipe in wait(list(waiting), timeout):
            rank_idx = waiting[pipe]  # type: ignore[index]
            try:
                kind, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                processes[rank_idx].join()
                kind, value = "error", _describe_exit(processes[rank_idx].exitcode)
            if kind == "report":
                if on_report is not None:
                    on_report(rank_idx, value)
                continue
            del waiting[pipe]  # type: ignore[arg-type]
            if kind == "result":
                results[rank_idx] = value
            else:
                errors.append(f"rank {rank_idx}/{len(pipes)} failed: {value}")
                deadline = min(deadline, time.monotonic() + _GRACE_SECS)
    if errors:
        raise RankError("\n".join(errors))
    return results


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code} before it had a result"


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _GRACE_SECS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()


def _run_rank(
    function: Callable[..., Any],
    args: Sequence[Any],
    rank_idx: int,
    num_ranks: int,
    port: int,
    pipe: Connection,
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The host's own name need not resolve, and all ranks are here.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    num_threads = max(1, num_cores() // num_ranks)
    rank = Rank(rank_idx, num_ranks, num_threads, lambda value: pipe.send(("report", value)))
    try:
        torch.set_num_threads(num_threads)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank_idx, world_size=num_ranks)
        result = function(rank, *args)
        dist.destroy_process_group()
        pipe.send(("result", result))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise SystemExit(1) from None
