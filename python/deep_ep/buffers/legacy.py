"""`Buffer`: the oldest generation of the API (V1) over `EPBuffer`.

Throughput calls are in `legacy_throughput`, low-latency ones in `legacy_low_latency`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from deep_ep import _core, comm
from deep_ep._core import ContractError
from deep_ep.buffers.ep import EPBuffer
from deep_ep.buffers.legacy_config import Config, default_config
from deep_ep.buffers.legacy_low_latency import LowLatencyCalls
from deep_ep.buffers.legacy_throughput import ThroughputCalls
from deep_ep.device import CPU, ordinal_of
from deep_ep.utils.event import EventHandle, EventOverlap
from deep_ep.utils.math import align, get_num_allocation_alignment

if TYPE_CHECKING:
    from typing import Protocol

    class MPICommunicator(Protocol):
        """What is asked of an mpi4py communicator."""

        def Get_rank(self) -> int: ...  # noqa: N802

        def Get_size(self) -> int: ...  # noqa: N802

        def allgather(self, sendobj: object) -> list: ...


__all__ = ["Buffer", "Config"]

# V1's sizes are those of queues, an `EPBuffer` keeps what calls return. On the CPU that takes no
# memory before it is used, and less would go back to the system after each call.
_LEAST_CPU_BYTES = 1 << 30


class Buffer(ThroughputCalls, LowLatencyCalls):
    """Dispatch and combine of V1 over the ranks of one group, for throughput and for low latency.

    Tensors lie where `EPBuffer` would have them: on torch's current GPU, else on the CPU
    (`EP_DEVICE`). Settings of networks and queue pairs have no effect.

    Attributes:
        group: The group, the very object that was passed.
        group_size: The number of ranks.
        rank: The index of this one.
        num_nvl_bytes: As passed, as are the following.
        num_rdma_bytes:
        low_latency_mode:
        explicitly_destroy:
        enable_shrink:
        runtime: The `EPBuffer` underneath; None once destroyed.
        num_sms: The most SMs of a call with a default config, for all buffers: see `set_num_sms`.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: comm.ProcessGroupLike | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: MPICommunicator | None = None,
    ) -> None:
        """Makes the buffer. Collective.

        Args:
            group: A torch process group of any backend, a wrapper of one, or a
                `deep_ep.comm.Group`; None: `comm`.
            num_nvl_bytes: Bytes for throughput calls, see `Config`; equal on all ranks.
            num_rdma_bytes: Bytes between machines or for low latency, see
                `get_low_latency_rdma_size_hint`; both together say how much memory is kept.
            low_latency_mode: No effect: every buffer takes all calls.
            num_qps_per_rank: No effect, as is the following.
            allow_nvlink_for_low_latency_mode:
            allow_mnnvl:
            explicitly_destroy: `destroy()` will be called.
            enable_shrink: Offer the mask of ranks.
            comm: An mpi4py communicator, instead of a group.

        Raises:
            ValueError: Neither `group` nor `comm` was given, or a size is negative.
            TypeError, TimeoutError: As `EPBuffer`.
        """
        if num_nvl_bytes < 0 or num_rdma_bytes < 0:
            raise ContractError(
                f"sizes must not be negative, got {num_nvl_bytes} and {num_rdma_bytes}"
            )
        ranks = _group_of(group, comm)
        self.group = group
        self.rank = ranks.rank()
        self.group_size = ranks.size()
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        num_bytes = num_nvl_bytes + num_rdma_bytes
        num_bytes = max(num_bytes, _LEAST_CPU_BYTES if ordinal_of(None) == CPU else 1)
        self._ep = EPBuffer(
            ranks,
            num_bytes=align(num_bytes, get_num_allocation_alignment()),
            # V1 knows no such limit: the largest that token ids have room for.
            num_max_tokens_per_rank=(2**31 - 1) // self.group_size,
            explicitly_destroy=explicitly_destroy,
        )
        self._local: dict[bool, torch.Tensor] = {}

    @property
    def runtime(self) -> EPBuffer | None:
        """The `EPBuffer` underneath; None once destroyed."""
        return None if self._ep.runtime is None else self._ep

    def destroy(self) -> None:
        """Ends the use of the buffer on this rank, as `EPBuffer.destroy`.

        Raises:
            ContractError: It was made without `explicitly_destroy`.
        """
        if not self.explicitly_destroy:
            raise ContractError("destroy() needs a buffer made with explicitly_destroy=True")
        self._local.clear()
        self._combine_memory = None
        self._ep.destroy()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: kernels are compiled for the GPU that is there."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the number of SMs of default configs, an even one, for all buffers."""
        if new_num_sms % 2 != 0:
            raise ContractError(f"the number of SMs must be even, got {new_num_sms}")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event that marks what the caller has done so far, on a GPU in the current stream."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> torch.cuda.Stream | None:
        """The CUDA stream that asynchronous calls run on; None on CPU ranks."""
        return self._ep.get_comm_stream()

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """Memory of this rank of the buffer's size, for the caller to use; no call touches it.

        Args:
            dtype: Of the elements.
            size: The shape; None: one dimension, all elements from the offset on.
            offset: Where to start, in elements.
            use_rdma_buffer: Of `num_rdma_bytes` instead of `num_nvl_bytes`.

        Returns:
            A view; all calls view the same memory.

        Raises:
            ContractError: There are not so many elements.
        """
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        if use_rdma_buffer not in self._local:
            index = self._ep.device_idx
            device = torch.device("cpu") if index == CPU else torch.device("cuda", index)
            self._local[use_rdma_buffer] = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        num_elements = num_bytes // dtype.itemsize
        memory = self._local[use_rdma_buffer][: num_elements * dtype.itemsize].view(dtype)
        wanted = num_elements - offset if size is None else math.prod(size)
        if offset < 0 or wanted < 0 or offset + wanted > num_elements:
            raise ContractError(
                f"the buffer has {num_elements} elements, got {wanted} from {offset} on"
            )
        memory = memory[offset : offset + wanted]
        return memory if size is None else memory.view(size)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The settings of a dispatch that names none, for any number of ranks."""
        return default_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The same for a combine."""
        return default_config(num_ranks, Buffer.num_sms, is_combine=True)


def _group_of(
    group: comm.ProcessGroupLike | None, communicator: MPICommunicator | None
) -> comm.ProcessGroupLike:
    if group is not None:
        return group
    if communicator is None:
        raise ContractError("group or comm must be given")
    rank, size = communicator.Get_rank(), communicator.Get_size()
    return comm.Group(_core.make_callback_bootstrap(rank, size, communicator.allgather))
