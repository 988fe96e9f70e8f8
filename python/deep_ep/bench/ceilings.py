"""What this machine can move and add at best, measured by all ranks at the same time.

The C++ core offers two loops that do nothing else:

    _core.copy_rows_seconds(num_rows: int, row_bytes: int, num_threads: int, num_iters: int)
        -> float
        Copies num_rows rows, scattered in the source by a fixed permutation, to consecutive rows
        with non-temporal stores.
    _core.sum_rows_seconds(num_outputs: int, num_terms: int, hidden: int, num_threads: int,
                           num_iters: int) -> float
        Writes num_outputs BF16 rows of `hidden` elements, each the FP32 sum of num_terms scattered
        rows of its own, rounded once.

Both work in their own memory, touched and run through once before the clock starts, release the
GIL and return the median seconds of one iteration. Threads share the rows evenly.
"""

from __future__ import annotations

from deep_ep import _core

# Well beyond any cache; more rows only take longer to touch.
_MAX_BYTES = 256 << 20


def copy_gbps(num_rows: int, row_bytes: int, num_threads: int, num_iters: int = 5) -> float:
    """Written GB/s of a copy of scattered rows on this rank; 0 if there is nothing to copy."""
    num_rows = min(num_rows, max(1, _MAX_BYTES // row_bytes))
    if num_rows == 0:
        return 0.0
    seconds = _core.copy_rows_seconds(
        num_rows=num_rows, row_bytes=row_bytes, num_threads=num_threads, num_iters=num_iters
    )
    return num_rows * row_bytes / seconds / 1e9


def sum_gbps(
    num_outputs: int, num_terms: int, hidden: int, num_threads: int, num_iters: int = 5
) -> float:
    """GB/s, read and written, of sums of `num_terms` scattered BF16 rows on this rank."""
    output_bytes = (num_terms + 1) * hidden * 2
    num_outputs = min(num_outputs, max(1, _MAX_BYTES // output_bytes))
    if num_outputs == 0:
        return 0.0
    seconds = _core.sum_rows_seconds(
        num_outputs=num_outputs,
        num_terms=num_terms,
        hidden=hidden,
        num_threads=num_threads,
        num_iters=num_iters,
    )
    return num_outputs * output_bytes / seconds / 1e9
