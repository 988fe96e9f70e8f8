"""Import, construction, destruction and exit, in every order."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import weakref
from typing import Any

import pytest
import torch

import deep_ep
import exchange as ex
from exchange import Call
from problem import Problem
from ranks import Rank, RankPool, fresh_ranks, run_threads, worker_environment

PROBLEM = Problem(num_ranks=2, tokens=(6, 3), hidden=16)


def run_script(code: str, *args: str, status: int = 0) -> str:
    """Runs a program of its own; returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", textwrap.dedent(code), *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=worker_environment(),
        check=False,
    )
    assert result.returncode == status, f"exit status {result.returncode}\n{result.stderr}"
    return result.stdout


# --- import (clients.md I7, I8) -------------------------------------------------------------------


def test_importing_loads_no_torch_starts_no_thread_and_prints_nothing() -> None:
    printed = run_script(
        """
        import os, sys
        import deep_ep
        loaded = [m for m in ("torch", "numpy") if m in sys.modules]
        assert not loaded, loaded
        assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
        with open("/proc/self/maps") as maps:
            mapped = maps.read()
        assert not any(name in mapped for name in ("libcuda", "libnccl", "libtorch"))
        sockets = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                   if os.path.lexists(f"/proc/self/fd/{fd}")]
        assert not any(name.startswith("socket:") for name in sockets), sockets
        """
    )
    assert printed == ""


def test_without_torch_the_package_imports_and_says_what_is_missing() -> None:
    run_script(
        """
        import sys
        sys.modules["torch"] = None  # as if it were not installed
        import deep_ep
        assert deep_ep.EPBuffer and deep_ep.EventOverlap and deep_ep.__version__
        group, = deep_ep.comm.thread_groups(1)
        assert (group.rank(), group.size()) == (0, 1)
        buffer = deep_ep.EPBuffer(group, num_max_tokens_per_rank=4, hidden=8)
        deep_ep.EventHandle().current_stream_wait()
        for use in (lambda: buffer.dispatch(None), lambda: deep_ep.topk_idx_t):
            try:
                use()
            except ImportError as error:
                assert "torch" in str(error)
            else:
                raise SystemExit("no ImportError")
        buffer.destroy()
        """
    )


def test_annotations_of_clients_can_be_evaluated_after_import() -> None:
    """I7."""
    run_script(
        """
        import typing, deep_ep
        def f(b: deep_ep.EPBuffer, h: deep_ep.EPHandle) -> deep_ep.EventOverlap: ...
        assert typing.get_type_hints(f)["b"] is deep_ep.EPBuffer
        """
    )


# --- destruction ----------------------------------------------------------------------------------


def test_destroy_may_be_called_twice_and_calls_after_it_are_refused(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        x, _, _, handle = ex.check_dispatch(buffer, rank, PROBLEM, Call())
        buffer.destroy()
        buffer.destroy()
        assert buffer.runtime is None
        assert buffer.context is None
        for call in (lambda: buffer.dispatch(x, handle=handle), lambda: buffer.combine(x, handle)):
            with pytest.raises((RuntimeError, AssertionError), match="destroyed"):
                call()

    run_threads(2, body)


def test_dropping_the_last_reference_frees_the_buffer(run: Any, backend: str) -> None:  # noqa: ANN401
    """C9: created and dropped many times; file descriptors and mappings do not grow."""
    run(2, create_and_drop)


def create_and_drop(rank: Rank) -> None:
    def once() -> None:
        buffer = ex.make_buffer(rank, PROBLEM, explicitly_destroy=False)
        reference = weakref.ref(buffer)
        ex.check_dispatch(buffer, rank, PROBLEM, Call())
        buffer.barrier()
        del buffer
        assert reference() is None

    for _ in range(3):
        once()
    gc.collect()
    rank.barrier()
    before = os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")
    rank.barrier()
    for _ in range(20):
        once()
    rank.barrier()
    after = os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")
    rank.barrier()
    assert len(after[0]) <= len(before[0]) + 4, "file descriptors leak"
    assert len(after[1]) <= len(before[1]) + 4, "threads leak"


def test_a_rank_may_destroy_while_another_is_still_in_combine(run: Any, backend: str) -> None:  # noqa: ANN401
    """C146: one rank is through with its calls and leaves at once, 30 times."""
    run(3, leave_at_once)


def leave_at_once(rank: Rank) -> None:
    problem = Problem(num_ranks=3, tokens=(40, 0, 7), hidden=512, num_experts=6)
    for turn in range(30):
        buffer = ex.make_buffer(rank, problem)
        x, _, _, handle = ex.check_dispatch(buffer, rank, problem, Call())
        ex.check_combine(buffer, rank, problem, Call(), handle)
        if turn % 3 == rank.index:
            buffer.destroy()
        del buffer, x, handle
        rank.barrier()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first_first", "last_first"])
def test_buffers_of_overlapping_groups_live_side_by_side(
    pool: RankPool, backend: str, order: tuple[int, int]
) -> None:
    """C142, G6: three buffers over two groups; any may be destroyed while others work."""
    pool.run(4, use_overlapping_groups, order)


def use_overlapping_groups(rank: Rank, order: tuple[int, int]) -> None:
    import torch.distributed as dist

    members = dist.get_process_group_ranks(rank.group)
    whole = Problem(num_ranks=4, tokens=(3, 1, 4, 2), num_experts=8, hidden=24)
    half = Problem(num_ranks=2, tokens=(5, 2), num_experts=4, hidden=40, seed=rank.index // 2)
    pairs = [dist.new_group(members[i : i + 2]) for i in (0, 2)]
    small = Rank(rank.index % 2, 2, pairs[rank.index // 2])
    here = [(rank, whole), (small, half), (rank, whole.rerouted(9))]
    buffers = [ex.make_buffer(r, p) for r, p in here]
    handles = [
        ex.check_dispatch(b, r, p, Call())[3] for b, (r, p) in zip(buffers, here, strict=True)
    ]
    for b, (r, p), h in list(zip(buffers, here, handles, strict=True))[::-1]:
        ex.check_combine(b, r, p, Call(), h)
    for index in order:
        buffers[index].destroy()
        ex.check_combine(buffers[2], *here[2], Call(), handles[2])
    buffers[2].destroy()


# --- the end of the process -----------------------------------------------------------------------

ENDINGS = {
    "nothing": "pass",
    "explicit_without_destroy": "pass",
    "destroy": "buffer.destroy()",
    "group_first": "dist.destroy_process_group(); buffer.destroy()",
    "group_first_then_garbage": "dist.destroy_process_group(); del buffer, handle; gc.collect()",
    "atexit": "atexit.register(lambda: (buffer.destroy(), dist.destroy_process_group()))",
    "late": "time.sleep(1.5 * rank)",
    "pending": "pending = buffer.dispatch(**args, async_with_compute_stream=True)",
    "cycle": "buffer.me = buffer; cycle = [buffer]; cycle.append(cycle)",
}

PROGRAM = """
    import atexit, gc, sys, time
    import torch, torch.distributed as dist
    import deep_ep
    rank, store, explicit, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "1", sys.argv[4]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    buffer = deep_ep.EPBuffer(dist.group.WORLD, num_max_tokens_per_rank=8, hidden=16,
                              explicitly_destroy=explicit)
    ids = torch.zeros(4, 1, dtype=torch.int64)
    args = dict(x=torch.zeros(4, 16, dtype=torch.bfloat16), topk_idx=ids, num_experts=2)
    x, _, _, handle, _ = buffer.dispatch(**args)
    buffer.combine(x, handle)
    exec(ending)
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_with_status_0(
    tmp_path: os.PathLike[str], backend: str, ending: str
) -> None:
    """C10, C11, C144: nothing waits for another rank when the process ends."""
    explicit = "0" if ending in ("nothing", "group_first_then_garbage") else "1"
    store = os.path.join(tmp_path, "store")
    programs = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                textwrap.dedent(PROGRAM),
                str(r),
                store,
                explicit,
                ENDINGS[ending],
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=worker_environment(),
        )
        for r in range(2)
    ]
    try:
        outputs = [program.communicate(timeout=60)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [0, 0], "\n".join(outputs)


def test_a_forked_child_leaves_the_buffer_of_its_parent_alone(backend: str) -> None:
    """C147: a data loader's child is made while a buffer lives, drops it, and ends."""
    with fresh_ranks(2) as ranks:
        ranks.run(2, fork_and_go_on)
        assert ranks.close() == [0, 0]


def fork_and_go_on(rank: Rank) -> None:
    import multiprocessing

    buffer = ex.make_buffer(rank, PROBLEM, explicitly_destroy=False)
    handle = ex.check_dispatch(buffer, rank, PROBLEM, Call())[3]
    for end in (drop_everything, destroy_in_child):
        child = multiprocessing.get_context("fork").Process(target=end, args=([buffer, handle],))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        ex.check_combine(buffer, rank, PROBLEM, Call(), handle)
        ex.check_dispatch(buffer, rank, PROBLEM.rerouted(3), Call())


def drop_everything(things: list[Any]) -> None:
    things.clear()
    gc.collect()
    torch.zeros(3).sum()


def destroy_in_child(things: list[Any]) -> None:
    things[0].destroy()


# --- groups (clients.md section 2) ----------------------------------------------------------------


class Wrapper:
    """A group of which one may ask nothing but rank, size and barrier."""

    def __init__(self, inner: Any) -> None:  # noqa: ANN401
        self.__inner = inner

    def rank(self) -> int:
        return self.__inner.rank()

    def size(self) -> int:
        return self.__inner.size()

    def barrier(self) -> None:
        self.__inner.barrier()

    @staticmethod
    def unwrap(group: Any) -> Any:  # noqa: ANN401
        return group.__inner if isinstance(group, Wrapper) else group


@pytest.mark.parametrize("kind", ["wrapper", "subclass"])
def test_a_wrapper_of_a_group_is_enough(pool: RankPool, backend: str, kind: str) -> None:
    """G3: functions of torch.distributed are looked up at the call, with `group=` as passed."""
    pool.run(3, use_wrapped_group, kind)


def use_wrapped_group(rank: Rank, kind: str) -> None:
    import torch.distributed as dist

    class Subclass(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(rank.index, rank.size)

    wrapped = Wrapper(rank.group) if kind == "wrapper" else Subclass()

    def patched(function: Any) -> Any:  # noqa: ANN401
        def call(*args: object, **options: Any) -> object:  # noqa: ANN401
            if options.get("group") is wrapped:
                options["group"] = rank.group
            args = tuple(rank.group if a is wrapped else a for a in args)
            return function(*args, **options)

        return call

    names = [n for n in dir(dist) if n.startswith(("all_gather", "broadcast", "barrier", "get_"))]
    saved = {name: getattr(dist, name) for name in names if callable(getattr(dist, name))}
    problem = Problem(num_ranks=3, num_experts=6)
    try:
        for name, function in saved.items():
            setattr(dist, name, patched(function))
        here = Rank(rank.index, rank.size, wrapped)
        assert deep_ep.get_physical_domain_size(wrapped) == (1, 3)
        buffer = ex.make_buffer(here, problem)
    finally:
        for name, function in saved.items():
            setattr(dist, name, function)
    assert buffer.group is wrapped
    handle = ex.check_dispatch(buffer, here, problem, Call())[3]
    ex.check_combine(buffer, here, problem, Call(), handle)
    buffer.destroy()


def test_ranks_of_the_environment_need_no_torch_group(backend: str) -> None:
    with fresh_ranks(3, use_torch_group=False) as ranks:
        ranks.start(3, meet_by_environment, free_port())
        outcomes = ranks.finish()
        assert [o.error for o in outcomes] == [None] * 3


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet_by_environment(rank: Rank, port: int) -> None:
    os.environ |= {
        "RANK": str(rank.index),
        "WORLD_SIZE": str(rank.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    group = deep_ep.comm.env_group()
    assert (group.rank(), group.size()) == (rank.index, rank.size)
    group.barrier()
    ex.check_round_trip(
        Rank(rank.index, rank.size, group),
        Problem(num_ranks=3, num_experts=6),
        Call(do_expand=True),
    )


def test_something_that_is_no_group_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="group"):
        deep_ep.EPBuffer(object(), num_max_tokens_per_rank=4, hidden=8)
