"""The benchmark as a user runs it: what it prints, never how fast anything is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="the benchmark compares with torch.distributed")

from deep_ep.__main__ import main
from deep_ep.bench.cases import case_names
from deep_ep.bench.timing import quantile

_SHAPE = ["--ranks", "2", "--tokens", "16", "--hidden", "256", "--topk", "4", "--experts", "8"]
_KEYS = [
    "op",
    "backend",
    "ranks",
    "tokens",
    "hidden",
    "topk",
    "experts",
    "dtype",
    "num_sms",
    "median_s",
    "p99_s",
    "bytes",
    "gbps",
    "ceiling_gbps",
    "peer",
    "peer_median_s",
]


def _run_bench(*args: str) -> str:
    command = [sys.executable, "-m", "deep_ep", "bench", *_SHAPE, "--iters", "2", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_json_has_one_object_a_case_with_the_keys_of_every_benchmark() -> None:
    lines = [json.loads(line) for line in _run_bench("--json").splitlines()]
    assert all(list(line) == _KEYS for line in lines)
    assert {(line["op"], line["dtype"]) for line in lines} == {
        (f"{op}{layout}", dtype)
        for op in ("dispatch", "cached_dispatch", "combine", "combine_unlent")
        for layout in ("", "_expanded")
        for dtype in ("bf16", "fp8")
        if dtype == "bf16" or "dispatch" in op
    }
    assert all(0 < line["median_s"] <= line["p99_s"] for line in lines)


def test_json_counts_the_bytes_that_must_move() -> None:
    lines = _run_bench("--json", "--dtype", "bf16", "--op", "dispatch,combine").splitlines()
    num_bytes = {line["op"]: line["bytes"] for line in map(json.loads, lines)}
    row_bytes = 256 * 2
    assert num_bytes["dispatch_expanded"] == 16 * 4 * row_bytes
    assert num_bytes["combine_expanded"] == (16 * 4 + 16) * row_bytes
    assert num_bytes["combine"] == num_bytes["dispatch"] + 16 * row_bytes


def test_table_says_what_was_run() -> None:
    table = _run_bench("--op", "combine", "--layout", "expanded")
    assert "2 ranks on" in table
    assert "python -m deep_ep bench --ranks 2" in table
    assert "combine_expanded" in table
    assert "size hint" in table


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--op", "gather"], "no 'gather' among dispatch"),
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--experts", "9", "--ranks", "2"], "--experts must be a multiple of --ranks"),
        (["--topk", "9", "--experts", "8"], "--topk must be at most --experts"),
        (["--hidden", "12"], "--hidden must be a multiple of 8"),
        (["--op", "combine", "--dtype", "fp8"], "combine takes bf16 only"),
    ],
    ids=["op", "tokens", "experts", "topk", "hidden", "dtype"],
)
def test_bad_arguments_are_refused(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *args])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_combine_is_measured_in_bf16_only() -> None:
    names = case_names(["dispatch", "combine"], ["compact"], ["bf16", "fp8"])
    assert names == [
        ("dispatch", "compact", "bf16"),
        ("dispatch", "compact", "fp8"),
        ("combine", "compact", "bf16"),
    ]


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.5, 2.0), (0.99, 4.0), (0.25, 1.0)], ids=["p50", "p99", "p25"]
)
def test_quantile_is_one_of_the_values(fraction: float, expected: float) -> None:
    assert quantile([3.0, 1.0, 4.0, 2.0], fraction) == expected
