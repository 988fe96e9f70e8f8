"""Groups of ranks: what a buffer is made over, how its ranks are placed, and how they wait.

A group is a torch process group (or anything with `rank()`, `size()` and `barrier()` that
`torch.distributed` takes as `group=`), or a `Group` of this module, which needs no torch:

    groups = deep_ep.comm.thread_groups(4)  # one for each of 4 threads
    group = deep_ep.comm.env_group()  # RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import deep_ep._core as _core  # not `from`: a missing module says so

from .device import CPU
from .glue import load_torch_glue

if TYPE_CHECKING:
    import torch

    from .buffers.ep import EPBuffer

__all__ = [
    "Group",
    "ProcessGroupLike",
    "barrier",
    "env_group",
    "get_comm_stream",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "thread_groups",
]


class ProcessGroupLike(Protocol):
    """What this package asks of a group."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


class Group:
    """One rank's end of a group without torch; used by one thread at a time.

    Made by `thread_groups` and `env_group`.
    """

    def __init__(self, bootstrap: _core.Bootstrap) -> None:
        self._bootstrap = bootstrap

    def rank(self) -> int:
        """The index of this rank."""
        return self._bootstrap.rank_idx

    def size(self) -> int:
        """The number of ranks."""
        return self._bootstrap.num_ranks

    def barrier(self) -> None:
        """Waits until all ranks have come.

        Raises:
            TimeoutError: Some did not come within the group's limit.
        """
        self._bootstrap.all_gather(b"")

    def __repr__(self) -> str:
        return f"Group(rank {self.rank()} of {self.size()})"


def thread_groups(
    num_ranks: int, num_domains: int = 1, *, timeout_secs: float = 300
) -> list[Group]:
    """The ends of a group whose ranks are threads of this process: give one to each thread.

    Args:
        num_ranks: Number of threads.
        num_domains: Number of scale-up domains that the ranks are to be split into, evenly and in
            rank order, as if each were a machine.
        timeout_secs: Limit of each wait for another rank, in seconds.

    Returns:
        One `Group` a rank, in rank order.

    Raises:
        ContractError: `num_ranks` is no positive multiple of `num_domains`.
    """
    if num_domains < 1 or num_ranks < 1 or num_ranks % num_domains != 0:
        raise _core.ContractError(
            "num_ranks must be a positive multiple of num_domains, "
            f"got {num_ranks} and {num_domains}"
        )
    ranks_per_domain = num_ranks // num_domains
    host_ids = [f"domain {rank // ranks_per_domain}" for rank in range(num_ranks)]
    return [Group(end) for end in _core.make_thread_bootstraps(num_ranks, timeout_secs, host_ids)]


def env_group(*, timeout_secs: float = 300) -> Group:
    """The group that `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` describe.

    Blocks until all ranks have called it. Rank 0 listens at the address.

    Args:
        timeout_secs: Limit of this and each later wait for another rank, in seconds.

    Returns:
        This process's end of the group.

    Raises:
        ContractError: A variable is missing or no number.
        TimeoutError: Some ranks did not come.
    """
    return Group(_core.make_env_bootstrap(timeout_secs))


def bootstrap_of(group: ProcessGroupLike) -> _core.Bootstrap:
    """How the C++ library reaches the other ranks of `group`.

    Raises:
        TypeError: `group` is no group.
    """
    if isinstance(group, Group):
        return group._bootstrap
    if not callable(getattr(group, "rank", None)) or not callable(getattr(group, "size", None)):
        raise TypeError(
            "group must be a torch process group or a deep_ep.comm.Group, "
            f"got {type(group).__name__}"
        )
    gather = load_torch_glue("a process group").all_gather_through(group)
    return _core.make_callback_bootstrap(group.rank(), group.size(), gather)


_topologies: WeakKeyDictionary[ProcessGroupLike, _core.Topology] = WeakKeyDictionary()


def remember_topology(group: ProcessGroupLike, topology: _core.Topology) -> None:
    """Spares later questions about the topology of `group` an exchange."""
    try:
        _topologies[group] = topology
    except TypeError:
        return  # it can be neither hashed nor weakly referenced: asking costs an exchange each time


def topology_of(group: ProcessGroupLike) -> _core.Topology:
    """The physical topology of a group. Collective the first time, unless it has a buffer."""
    try:
        return _topologies[group]
    except (KeyError, TypeError):
        bootstrap = bootstrap_of(group)
    host_ids = [name.decode() for name in bootstrap.all_gather(bootstrap.host_id.encode())]
    topology = _core.topology_from_host_ids(bootstrap.rank_idx, host_ids)
    remember_topology(group, topology)
    return topology


def get_physical_domain_size(group_or_buffer: ProcessGroupLike | EPBuffer) -> tuple[int, int]:
    """How the ranks are spread over machines.

    Args:
        group_or_buffer: A group, then collective the first time, or a buffer.

    Returns:
        The number of scale-up domains, and of ranks in each of them.
    """
    if hasattr(group_or_buffer, "num_nvlink_ranks"):
        return group_or_buffer.num_rdma_ranks, group_or_buffer.num_nvlink_ranks
    topology = topology_of(group_or_buffer)
    return topology.num_scaleout_ranks, topology.num_scaleup_ranks


def get_logical_domain_size(
    group_or_buffer: ProcessGroupLike | EPBuffer, allow_hybrid_mode: bool | None = None
) -> tuple[int, int]:
    """How the ranks are grouped by the routing.

    Args:
        group_or_buffer: A group, then collective the first time, or a buffer.
        allow_hybrid_mode: Whether tokens between domains are routed in two levels, None: yes. A
            buffer's own setting wins.

    Returns:
        The number of scale-out ranks and of scale-up ranks, `(1, num_ranks)` without hybrid mode.
    """
    if hasattr(group_or_buffer, "num_scaleup_ranks"):
        return group_or_buffer.num_scaleout_ranks, group_or_buffer.num_scaleup_ranks
    topology = _core.logical_topology(topology_of(group_or_buffer), allow_hybrid_mode is not False)
    return topology.num_scaleout_ranks, topology.num_scaleup_ranks


def barrier(
    buffer: EPBuffer,
    wait_comm_stream: bool = True,
    with_cpu_sync: bool = False,
    sequential: bool = True,
    context_idx: int | None = None,
) -> None:
    """Makes all ranks of a buffer wait for each other, after the calls made so far. Collective.

    Args:
        buffer: The buffer.
        wait_comm_stream: No effect: the barrier always comes after the buffer's calls.
        with_cpu_sync: Block until all have come. CPU ranks always do; otherwise the current stream
            waits.
        sequential: No effect: every rank always waits for every other.
        context_idx: No effect: the buffer has one context.

    Raises:
        TimeoutError: Some ranks did not come.
        RuntimeError: The buffer was destroyed, or a rank is gone.
    """
    event = buffer._live_runtime("barrier").barrier(buffer._current_stream())
    if with_cpu_sync:
        event.wait()


def get_comm_stream(buffer: EPBuffer) -> torch.cuda.Stream | None:
    """The CUDA stream that asynchronous calls of `buffer` run on, until it is destroyed.

    None on CPU ranks, which have no streams.
    """
    if buffer.device_idx == CPU:
        return None
    import torch

    stream = buffer._live_runtime("get_comm_stream").comm_stream
    return torch.cuda.ExternalStream(stream, device=buffer.device_idx)
