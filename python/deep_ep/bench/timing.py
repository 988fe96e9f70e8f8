"""Times a collective operation: from when the last rank starts until the last rank has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def time_collective(
    operation: Callable[[], Any], meet: Callable[[], None], num_iters: int, num_warmups: int
) -> list[float]:
    """Seconds of each iteration, the same on all ranks. Collective.

    The iterations follow each other at once, as layers do: `meet` is a barrier that takes little
    time itself, so that the caches hold what the iteration before left in them. The clock is the
    host's monotonic one, which all processes share. What an iteration returned is freed before the
    next one starts, outside the time.
    """
    starts, ends = [], []
    for _ in range(num_warmups + num_iters):
        meet()
        starts.append(time.monotonic())
        result = operation()
        ends.append(time.monotonic())
        del result
    seconds = _maximum(ends) - _maximum(starts)
    return seconds[num_warmups:].tolist()


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
    return -_maximum([-value]).item()


def _maximum(values: list[float]) -> torch.Tensor:
    largest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest
