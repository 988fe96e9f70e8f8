"""Runs the cases on one rank; rank 0 reports each result as it comes."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from deep_ep import EPBuffer

from .cases import Bench, case_names
from .ranks import Rank
from .report import Result, Shape
from .timing import mean, minimum, quantile, time_collective

_NUM_WARMUPS = 3
# torch.distributed is slow and only needs a median.
_NUM_MAX_PEER_ITERS = 10


@dataclass(frozen=True)
class Memory:
    """Window memory of a run.

    Attributes:
        hint_bytes: what `get_buffer_size_hint` says for a rank.
        window_bytes: shared memory that a rank has touched, mean over ranks; 0: unknown.
    """

    hint_bytes: int
    window_bytes: int

    def describe(self) -> str:
        """One line."""
        return (
            f"size hint {self.hint_bytes / 1e6:.0f} MB a rank, shared memory in use "
            f"{self.window_bytes / 1e6:.0f} MB a rank"
        )


def measure_on_rank(
    rank: Rank,
    shape: Shape,
    operations: list[str],
    layouts: list[str],
    dtypes: list[str],
    num_iters: int,
) -> None:
    """Measures all cases. Rank 0 reports a `Result` for each, then `Memory`."""
    group = dist.group.WORLD
    sizes = {
        "num_max_tokens_per_rank": shape.tokens,
        "hidden": shape.hidden,
        "num_topk": shape.topk,
    }
    hint = EPBuffer.get_buffer_size_hint(group, **sizes)
    buffer = EPBuffer(group, **sizes, explicitly_destroy=True)
    bench = Bench(rank, shape, buffer)
    for operation, layout, dtype in case_names(operations, layouts, dtypes):
        result = _measure(bench, buffer, operation, layout, dtype, num_iters)
        if rank.idx == 0:
            rank.report(result)
        gc.collect()  # what the case held goes back to the window before the next one
    window_bytes = int(mean(_shared_bytes()))
    if rank.idx == 0:
        rank.report(Memory(hint, window_bytes))
    buffer.destroy()


def _measure(
    bench: Bench, buffer: EPBuffer, operation: str, layout: str, dtype: str, num_iters: int
) -> Result:
    case = bench.make(operation, layout, dtype)
    case.check(case.run(), case.run_peer())
    dist.barrier()
    # The slowest rank's, as for the operation itself.
    ceiling = minimum(case.ceiling())
    dist.barrier()
    sum8 = minimum(case.sum8()) if case.sum8 is not None else 0.0
    seconds = time_collective(case.run, buffer.barrier, num_iters, _NUM_WARMUPS)
    num_peer_iters = min(num_iters, _NUM_MAX_PEER_ITERS)
    peer_seconds = time_collective(case.run_peer, buffer.barrier, num_peer_iters, num_warmups=1)
    return Result(
        op=operation if layout == "compact" else f"{operation}_{layout}",
        dtype=dtype,
        median_s=quantile(seconds, 0.5),
        p99_s=quantile(seconds, 0.99),
        bytes=int(mean(case.num_bytes)),
        ceiling_gbps=ceiling,
        sum8_gbps=sum8,
        peer_median_s=quantile(peer_seconds, 0.5),
    )


def _shared_bytes() -> int:
    """Shared memory of this process in bytes; a page that two processes use counts half."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Shmem:"):
            return int(line.split()[1]) * 1024
    return 0
