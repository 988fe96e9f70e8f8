"""Processes, seeds and printing of programs that test or measure a buffer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from deep_ep.comm import get_physical_domain_size

if TYPE_CHECKING:
    from types import TracebackType

    import torch.distributed as dist

__all__ = [
    "EnvOverride",
    "check_torch_deterministic",
    "dist_print",
    "get_global_seed",
    "get_local_seed",
    "get_physical_domain_size",
    "init_dist",
    "init_seed",
]

_global_seed = 0
_local_seed = 0
_local_rank_idx = 0


def init_dist(
    local_rank: int, num_local_ranks: int, seed: int = 0
) -> tuple[int, int, dist.ProcessGroup]:
    """Joins this process to all others through gloo, and seeds it. Collective.

    Reads `MASTER_ADDR` (127.0.0.1), `MASTER_PORT` (8361), and, as launchers of one process a
    machine set them, `WORLD_SIZE` (1), the number of machines, and `RANK` (0), the index of this
    one. Makes bfloat16 the default dtype.

    Args:
        local_rank: Index of this process on its machine.
        num_local_ranks: Processes on each machine.
        seed: See `init_seed`.

    Returns:
        The rank, the number of ranks, and a group of all of them.
    """
    import torch
    import torch.distributed as dist

    global _local_rank_idx
    address = os.getenv("MASTER_ADDR", "127.0.0.1")
    port = int(os.getenv("MASTER_PORT", "8361"))
    num_machines = int(os.getenv("WORLD_SIZE", "1"))
    machine_idx = int(os.getenv("RANK", "0"))
    dist.init_process_group(
        backend="gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=num_machines * num_local_ranks,
        rank=machine_idx * num_local_ranks + local_rank,
    )
    torch.set_default_dtype(torch.bfloat16)
    _local_rank_idx = local_rank
    init_seed(seed)
    num_ranks = dist.get_world_size()
    return dist.get_rank(), num_ranks, dist.new_group(list(range(num_ranks)))


def init_seed(seed: int = 0) -> None:
    """Seeds torch and `random`, each rank differently.

    Args:
        seed: Equal on all ranks.
    """
    import random

    import torch
    import torch.distributed as dist

    global _global_seed, _local_seed
    _global_seed = seed
    _local_seed = seed + (dist.get_rank() if dist.is_initialized() else 0)
    torch.manual_seed(_local_seed)
    random.seed(_local_seed)


def get_global_seed() -> int:
    """The seed that all ranks share."""
    return _global_seed


def get_local_seed() -> int:
    """The seed of this rank."""
    return _local_seed


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Prints on every rank, or on one of each machine, then waits for all ranks. Collective.

    Args:
        s: What to print.
        once_in_node: Print on the first process of each machine only.
    """
    import torch.distributed as dist

    if not once_in_node or _local_rank_idx == 0:
        print(s, flush=True)
    dist.barrier()


def check_torch_deterministic() -> bool:
    """Whether torch was asked for deterministic algorithms that also fill what they leave unset."""
    import torch

    return (
        torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory
    )


class EnvOverride:
    """Sets environment variables for the duration of a `with`; None unsets one."""

    def __init__(self, **variables: str | int | None) -> None:
        self._variables = variables
        self._saved: dict[str, str | None] = {}

    def __enter__(self) -> EnvOverride:
        self._saved = {name: os.environ.get(name) for name in self._variables}
        _set_all(self._variables)
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _set_all(self._saved)


def _set_all(variables: dict[str, str | int | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)
