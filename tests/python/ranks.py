"""Runs a function on N ranks: processes of a pool, processes of one test, or threads of this one.

A rank function takes a `Rank` and whatever arguments the test gives. For process ranks it must be a
function of a module, and arguments and results must pickle. Nothing here forks, everything is
bounded: ranks that do not come back are shown with their stacks and killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_SECS = 150.0  # of one run, and of the start and the end of its processes
GRACE_SECS = 10.0  # for the other ranks once one has failed


@dataclass
class Rank:
    """What a rank function knows about itself."""

    index: int
    size: int
    group: Any  # a torch process group, or a thread group of the library
    num_domains: int = 1
    _report: Callable[[Any], None] = field(default=lambda _: None, repr=False)

    def barrier(self) -> None:
        """Waits for the other ranks, without any buffer."""
        work = self.group.barrier()
        if work is not None:
            work.wait()

    def report(self, value: object) -> None:
        """Sends a note to the test while the function runs; see `ProcessRanks.next_report`."""
        self._report(value)


@dataclass
class Outcome:
    """How one rank ended: with a value, with an error's text, or not at all."""

    index: int
    value: Any = None
    error: str | None = None
    died: bool = False
    at: float = 0.0


class RanksFailedError(AssertionError):
    """Some ranks failed; the text says which, how, and in which order."""

    def __init__(self, outcomes: Sequence[Outcome], size: int) -> None:
        failed = sorted((o for o in outcomes if o.error or o.died), key=lambda o: o.at)
        text = [f"{len(failed)} of {size} ranks failed, the first one first:"]
        text += [f"--- rank {o.index}: {o.error or 'died'}" for o in failed]
        super().__init__("\n".join(text))
        self.outcomes = outcomes


def values_of(outcomes: Sequence[Outcome]) -> list[Any]:
    """The value of each rank. Raises RanksFailedError unless all have one."""
    if any(o.error or o.died for o in outcomes):
        raise RanksFailedError(outcomes, len(outcomes))
    return [o.value for o in outcomes]


def describe_error() -> str:
    """The exception being handled, with what a test wants to see; keeps no frame alive."""
    return traceback.format_exc(limit=-8)


def host_id(rank: int, size: int, num_domains: int) -> str:
    return f"test-domain-{rank // (size // num_domains)}"


def own_stream() -> contextlib.AbstractContextManager[Any]:
    """A CUDA stream for this thread: ranks of one process that share a GPU need one each."""
    if not os.environ.get("EP_DEVICE", "cpu").startswith("cuda"):
        return contextlib.nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.Stream())


# --- threads --------------------------------------------------------------------------------------


def run_threads(
    size: int,
    function: Callable[..., Any],
    *args: object,
    num_domains: int = 1,
    timeout: float = TIMEOUT_SECS,
) -> list[Any]:
    """Runs `function(Rank, *args)` on ranks that are threads; returns their values."""
    return values_of(
        thread_outcomes(size, function, *args, num_domains=num_domains, timeout=timeout)
    )


def thread_outcomes(
    size: int,
    function: Callable[..., Any],
    *args: object,
    num_domains: int = 1,
    timeout: float = TIMEOUT_SECS,
) -> list[Outcome]:
    import deep_ep

    groups = deep_ep.comm.thread_groups(size, num_domains)
    outcomes = [Outcome(i, error="has not come back: its stack is on stderr") for i in range(size)]

    def body(index: int, group: object) -> None:
        try:
            with own_stream():
                value = function(Rank(index, size, group, num_domains), *args)
            outcomes[index] = Outcome(index, value=value)
        except BaseException:  # whatever it is, the test shall see it
            outcomes[index] = Outcome(index, error=describe_error(), at=time.monotonic())

    threads = [
        threading.Thread(target=body, args=(i, g), name=f"rank-{i}", daemon=True)
        for i, g in enumerate(groups)
    ]
    del groups
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(all_threads=True)
    return outcomes


# --- processes ------------------------------------------------------------------------------------


class ProcessRanks:
    """A fixed set of processes that share a gloo group. A run uses the last `size` of them.

    The last ones, so that a rank's place in the group of a run differs from its global rank.
    """

    def __init__(
        self, num_processes: int, env: dict[str, str] | None = None, use_torch_group: bool = True
    ) -> None:
        self.num_processes = num_processes
        self.meeting = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[Connection] = []
        self.active: list[int] = []  # processes of the run under way, in rank order
        self.notes: list[list[Any]] = []
        self.groups: set[tuple[int, int, int]] = set()  # (ranks, domains, generation)
        self.use_torch_group = use_torch_group
        self.generation = 0  # of the groups: ranks of a failed run may have left one half-way
        for index in range(num_processes):
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-X", "faulthandler", str(Path(__file__).resolve())]
            command += [str(theirs.fileno()), str(index), str(num_processes)]
            command += [str(self.meeting / "store") if use_torch_group else "-"]
            self.processes.append(
                subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    env=worker_environment() | (env or {}),
                    stdin=subprocess.DEVNULL,
                )
            )
            theirs.close()
            self.pipes.append(Connection(ours.detach()))

    def is_usable(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def pid(self, rank: int) -> int:
        return self.processes[self.active[rank]].pid

    def start(
        self,
        size: int,
        function: Callable[..., Any],
        *args: object,
        num_domains: int = 1,
        env: dict[str, str] | None = None,
    ) -> None:
        """Starts the function on `size` ranks; `finish` collects."""
        self.active = list(range(self.num_processes - size, self.num_processes))
        self.notes = [[] for _ in self.active]
        key = (size, num_domains, self.generation)
        if self.use_torch_group and key not in self.groups:
            for pipe in self.pipes:  # all of them: torch wants each process to take part
                pipe.send(("group", key, self.active))
            self.groups.add(key)
        for rank, process in enumerate(self.active):
            settings = {"EP_DEVICE": os.environ.get("EP_DEVICE", "cpu")} | (env or {})
            if num_domains > 1:
                settings["EP_HOST_ID"] = host_id(rank, size, num_domains)
            where = (function.__module__, function.__qualname__)
            self.pipes[process].send(("run", where, args, rank, key, settings))

    def next_report(self, rank: int, timeout: float = TIMEOUT_SECS) -> object:
        """Waits for what `rank` reports next."""
        if not self.notes[rank]:
            pipe = self.pipes[self.active[rank]]
            assert pipe.poll(timeout), f"rank {rank} reported nothing within {timeout} s"
            kind, value = pipe.recv()
            assert kind == "report", f"rank {rank} ended instead of reporting: {value}"
            return value
        return self.notes[rank].pop(0)

    def finish(
        self,
        ranks: Iterable[int] | None = None,
        timeout: float = TIMEOUT_SECS,
        grace: float = GRACE_SECS,
    ) -> list[Outcome]:
        """The outcome of these ranks (all), in this order. Kills all if one does not come back."""
        wanted = list(range(len(self.active)) if ranks is None else ranks)
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < len(wanted):
            pending = {self.pipes[self.active[r]]: r for r in wanted if r not in outcomes}
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up(outcomes, list(pending.values()))
                break
            for pipe in ready:
                rank = pending[pipe]  # type: ignore[index]
                outcome = self._receive(pipe, rank)  # type: ignore[arg-type]
                if outcome is None:
                    continue
                outcomes[rank] = outcome
                if outcome.error or outcome.died:
                    deadline = min(deadline, time.monotonic() + grace)
        return [outcomes[rank] for rank in wanted]

    def _receive(self, pipe: Connection, rank: int) -> Outcome | None:
        now = time.monotonic()
        try:
            kind, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            return Outcome(rank, died=True, at=now)
        if kind == "report":
            self.notes[rank].append(value)
            return None
        return Outcome(rank, **{kind: value}, at=now)

    def _give_up(self, outcomes: dict[int, Outcome], late: list[int]) -> None:
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(rank), signal.SIGABRT)  # faulthandler shows the stacks
            outcomes[rank] = Outcome(
                rank, error="has not come back: its stack is on stderr", at=time.monotonic()
            )
        time.sleep(0.5)
        self.kill()

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *args: object,
        num_domains: int = 1,
        timeout: float = TIMEOUT_SECS,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Runs `function(Rank, *args)` on `size` ranks; returns their values, in rank order."""
        self.start(size, function, *args, num_domains=num_domains, env=env)
        outcomes = self.finish(timeout=timeout)
        if any(o.error or o.died for o in outcomes):
            self.generation += 1
        return values_of(outcomes)

    def close(self) -> list[int]:
        """Lets the processes end by themselves; returns their exit codes."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + TIMEOUT_SECS
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        codes = [process.poll() for process in self.processes]
        self.kill()
        return [-signal.SIGKILL if code is None else code for code in codes]

    def kill(self) -> None:
        """Ends the processes that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait(GRACE_SECS)
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.meeting, ignore_errors=True)


@contextlib.contextmanager
def fresh_ranks(
    num_processes: int, env: dict[str, str] | None = None, use_torch_group: bool = True
) -> Iterator[ProcessRanks]:
    """Processes of one test, which may be killed."""
    ranks = ProcessRanks(num_processes, env, use_torch_group)
    try:
        yield ranks
    finally:
        ranks.kill()


class RankPool:
    """The processes that tests share: a small and a large set, each started when first needed."""

    SIZES = (4, 8)

    def __init__(self) -> None:
        self.sets: dict[int, ProcessRanks] = {}

    def run(self, size: int, function: Callable[..., Any], *args: object, **options: Any) -> list:  # noqa: ANN401
        fitting = next(s for s in self.SIZES if s >= size)
        ranks = self.sets.get(fitting)
        if ranks is None or not ranks.is_usable():
            ranks = self.sets[fitting] = ProcessRanks(fitting)
        return ranks.run(size, function, *args, **options)

    def close(self) -> None:
        for ranks in self.sets.values():
            ranks.close()
        self.sets.clear()


def worker_environment() -> dict[str, str]:
    """No settings of the user, and one thread for torch: the ranks are many, the cores few."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("EP_")}
    return {
        **inherited,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


# --- inside a worker process ----------------------------------------------------------------------


def serve(pipe: Connection, process: int, num_processes: int, store: str) -> None:
    """Runs what the test sends until it sends None or goes away."""
    groups: dict[tuple[int, int, int], Any] = {}  # by ranks, domains, generation
    if store != "-":
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=process,
            world_size=num_processes,
            timeout=timedelta(seconds=TIMEOUT_SECS),
        )
    while True:
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        if message is None:
            return
        if message[0] == "group":
            groups[message[1]] = dist.new_group(message[2])
        else:
            pipe.send(answer(pipe, message[1:], groups))


def answer(
    pipe: Connection, message: tuple, groups: dict[tuple[int, int, int], Any]
) -> tuple[str, object]:
    (module, name), args, rank, key, env = message
    size, num_domains, _ = key
    saved = {key: os.environ.get(key) for key in env}
    os.environ.update(env)
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        here = Rank(
            rank,
            size,
            groups.get(key),
            num_domains,
            lambda value: pipe.send(("report", value)),
        )
        return "value", function(here, *args)
    except BaseException:  # whatever it is, the test shall see it
        return "error", describe_error()
    finally:
        for key, value in saved.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def main() -> None:
    sys.modules["ranks"] = sys.modules["__main__"]  # one copy of the classes above
    fd, process, num_processes = (int(text) for text in sys.argv[1:4])
    serve(Connection(fd), process, num_processes, sys.argv[4])


if __name__ == "__main__":
    main()
