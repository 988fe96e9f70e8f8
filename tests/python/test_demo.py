"""The demo as a user runs it, and the processes under it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the demo trains with torch")
pytest.importorskip("tqdm", reason="the demo shows its progress with tqdm")

from deep_ep.__main__ import main
from deep_ep.bench.ranks import Rank, RankError, run_ranks

_DEMO = [sys.executable, "-m", "deep_ep", "demo"]


def _run_demo(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_DEMO, *args], capture_output=True, text=True, timeout=300, check=False)


def test_ranks_and_one_process_agree_bit_by_bit() -> None:
    done = _run_demo("--ranks", "2", "--steps", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert figures["agrees"] is True
    assert figures["differing"] == []
    assert len(figures["losses"]) == 3
    assert figures["losses"] == figures["one_process_losses"]
    assert figures["fp32_difference"] <= figures["fp32_tolerance"]


def test_wrong_rows_in_one_step_fail_the_demo() -> None:
    done = _run_demo("--ranks", "2", "--steps", "3", "--inject-error", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT bit-equal" in done.stdout
    assert "loss of step 1" in done.stdout
    assert "loss of step 0" not in done.stdout
    assert done.stdout.endswith("DOES NOT AGREE\n")


def _running_in_group(group: int) -> list[str]:
    """Status lines of the processes of a process group that still run."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            lines.append(path.read_text())
    fields = {line: line.rpartition(")")[2].split() for line in lines}
    return [
        line for line, (state, _, its, *_) in fields.items() if int(its) == group and state != "Z"
    ]


def test_interrupt_ends_all_processes() -> None:
    demo = subprocess.Popen(
        [*_DEMO, "--ranks", "2", "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert demo.stdout is not None
    demo.stdout.readline()  # the ranks start after the demo has said what it does
    time.sleep(1)
    os.killpg(demo.pid, signal.SIGINT)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130, errors
    assert errors.endswith("interrupted\n")
    assert "Traceback" not in errors
    deadline = time.monotonic() + 30
    while _running_in_group(demo.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _running_in_group(demo.pid) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ranks", "0"], "--ranks must be 1 to 64, got 0"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--steps", "2", "--inject-error", "2"], "--inject-error must be one of the 2 steps"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
    ids=["no_ranks", "no_steps", "no_such_step", "unknown"],
)
def test_bad_arguments_are_refused(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", *args])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def _raise_on_rank_1(rank: Rank) -> None:
    if rank.idx == 1:
        raise ValueError("no such expert")
    time.sleep(600)


def _die_on_rank_1(rank: Rank) -> None:
    if rank.idx == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def _square(rank: Rank, base: int) -> int:
    rank.report("started")
    return (base + rank.idx) ** 2


def test_results_come_in_the_order_of_ranks() -> None:
    reports: list[tuple[int, str]] = []
    results = run_ranks(_square, 2, (3,), lambda idx, value: reports.append((idx, value)))
    assert results == [9, 16]
    assert sorted(reports) == [(0, "started"), (1, "started")]


@pytest.mark.parametrize(
    ("function", "message"),
    [(_raise_on_rank_1, "no such expert"), (_die_on_rank_1, "killed by SIGKILL")],
    ids=["raises", "dies"],
)
def test_a_failing_rank_ends_the_others(function: object, message: str) -> None:
    with pytest.raises(RankError, match=rf"(?s)rank 1/2 failed: .*{message}"):
        run_ranks(function, 2)
