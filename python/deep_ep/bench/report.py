"""One line of the benchmark, as JSON and as a table."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """What all lines of a run share.

    Attributes:
        ranks: processes.
        tokens: tokens of each rank.
        hidden: elements of a row.
        topk: experts of a token.
        experts: experts of all ranks.
        num_sms: worker threads a rank, 0: the library chooses.
    """

    ranks: int
    tokens: int
    hidden: int
    topk: int
    experts: int
    num_sms: int


@dataclass(frozen=True)
class Result:
    """One operation's figures, of one rank on average; README.md in bench/ says what is counted.

    Attributes:
        op: name of the operation and its layout.
        dtype: of the rows.
        median_s: median time of an iteration.
        p99_s: 99th percentile.
        bytes: that a rank must move.
        ceiling_gbps: what a rank can move in the ceiling's loop, all ranks at once.
        sum8_gbps: the same for sums of 8 rows; 0 unless the operation is a combine.
        peer_median_s: median time of the same exchange with torch.distributed.
    """

    op: str
    dtype: str
    median_s: float
    p99_s: float
    bytes: int
    ceiling_gbps: float
    sum8_gbps: float
    peer_median_s: float

    @property
    def gbps(self) -> float:
        """GB/s of a rank."""
        return self.bytes / self.median_s / 1e9

    def to_json(self, shape: Shape, backend: str) -> str:
        """One line, with the keys of every benchmark of this library."""
        return json.dumps(
            {
                "op": self.op,
                "backend": backend,
                "ranks": shape.ranks,
                "tokens": shape.tokens,
                "hidden": shape.hidden,
                "topk": shape.topk,
                "experts": shape.experts,
                "dtype": self.dtype,
                "num_sms": shape.num_sms,
                "median_s": self.median_s,
                "p99_s": self.p99_s,
                "bytes": self.bytes,
                "gbps": self.gbps,
                "ceiling_gbps": self.ceiling_gbps,
                "peer": "gloo",
                "peer_median_s": self.peer_median_s,
            }
        )


_HEADER = (
    f"{'operation':<26}{'dtype':>6}{'median ms':>11}{'p99 ms':>9}{'MB':>8}{'GB/s':>7}"
    f"{'ceiling':>9}{'%':>5}{'% sum8':>8}{'gloo ms':>10}{'x gloo':>8}"
)


def header(shape: Shape, command: str, num_cores: int, num_iters: int) -> str:
    """The setting, the command that repeats it, and the table's head."""
    return (
        f"{shape.ranks} ranks on {num_cores} cores ({_cpu_name()}), {shape.tokens} tokens a rank, "
        f"hidden {shape.hidden}, top {shape.topk} of {shape.experts} experts, "
        f"{num_iters} iterations\n"
        f"{command}\n"
        "MB, GB/s and ceiling are those of one rank while all ranks run; ceiling: copy of\n"
        "scattered rows (dispatch), sum of as many rows as this combine reads (combine); "
        "sum8: sum of 8 rows\n\n"
        f"{_HEADER}"
    )


def to_line(result: Result) -> str:
    """A line of the table."""
    percent = _percent(result.gbps, result.ceiling_gbps)
    percent_of_sum8 = _percent(result.gbps, result.sum8_gbps)
    return (
        f"{result.op:<26}{result.dtype:>6}{result.median_s * 1e3:>11.3f}{result.p99_s * 1e3:>9.3f}"
        f"{result.bytes / 1e6:>8.1f}{result.gbps:>7.2f}{result.ceiling_gbps:>9.2f}"
        f"{percent:>5}{percent_of_sum8:>8}"
        f"{result.peer_median_s * 1e3:>10.2f}{result.peer_median_s / result.median_s:>8.1f}"
    )


def _percent(value: float, whole: float) -> str:
    return f"{100 * value / whole:.0f}" if whole > 0 else "-"


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
