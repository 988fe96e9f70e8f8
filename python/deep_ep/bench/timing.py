"""Times a collective operation: from a start common to all ranks until the last rank has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .ranks import Rank, num_cores

# Within this the ranks learn of the common start.
_LEAD_SECS = 0.001


def time_collective(
    operation: Callable[[], Any], rank: Rank, num_iters: int, num_warmups: int
) -> list[float]:
    """Seconds of each iteration, the same on all ranks. Collective.

    The clock is the host's monotonic one, which all processes share. What an iteration returned is
    freed before the next one starts, outside the time.
    """
    seconds = []
    for iteration in range(num_warmups + num_iters):
        start = _common_start(rank)
        result = operation()
        end = _maximum(time.monotonic())
        del result
        if iteration >= num_warmups:
            seconds.append(end - start)
    return seconds


def quantile(seconds: list[float], fraction: float) -> float:
    """The smallest of the values that at least this fraction of them does not exceed."""
    ordered = sorted(seconds)
    return ordered[max(0, -int(-fraction * len(ordered) // 1) - 1)]


def mean(value: float) -> float:
    """The mean over ranks. Collective."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def minimum(value: float) -> float:
    """The smallest over ranks. Collective."""
    return -_maximum(-value)


def _maximum(value: float) -> float:
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def _common_start(rank: Rank) -> float:
    start = _maximum(time.monotonic() + _LEAD_SECS)
    if rank.num_ranks > num_cores():
        time.sleep(max(0.0, start - time.monotonic()))
    else:
        # Waking up from a sleep would cost more than a small exchange takes.
        while time.monotonic() < start:
            pass
    return start
