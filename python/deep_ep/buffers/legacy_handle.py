"""Handles of V1: tuples of tensors and nothing else, which lead back to the handle of `EPBuffer`.

Programs take such a tuple apart, let autograd save its tensors, and put it together again. One of
the tensors, the key, holds a number that names the routing. It lies on the CPU, so that reading it
waits for no GPU, and its memory belongs to a Python object that holds the routing: the routing
lives as long as any tensor on that memory.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from deep_ep._core import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep_ep.buffers.ep import EPBuffer, EPHandle

__all__ = ["Routing", "check_handle", "find_routing", "make_handle", "source_ranks"]

_LEN_ONE_DOMAIN = 6
_LEN_DOMAINS = 10


@dataclass
class Routing:
    """What the calls of one routing need.

    Attributes:
        core: The handle of `EPBuffer`.
        num_worst_tokens: Rows of received tensors, chosen without knowing the counts; 0: rows are
            exact.
    """

    core: EPHandle
    num_worst_tokens: int = 0


class _KeyMemory(bytearray):
    __slots__ = ("__weakref__", "routing")


_routings: WeakValueDictionary[int, _KeyMemory] = WeakValueDictionary()


def make_handle(
    ep: EPBuffer, routing: Routing, is_token_in_rank: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The tuple that a dispatch returns. There are no channels: their matrices are empty.

    In one scale-up domain `(rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix,
    recv_src_idx, is_token_in_rank, key)`, else `(is_token_in_rank, rdma_channel_prefix_matrix,
    gbl_channel_prefix_matrix, recv_rdma_channel_prefix_matrix, recv_rdma_rank_prefix_sum,
    recv_gbl_channel_prefix_matrix, recv_gbl_rank_prefix_sum, recv_src_meta, send_rdma_head, key)`.
    Of `rank_prefix_matrix` only this rank's column is known, others are 0. A row of
    `recv_src_meta`, `[n, 8]` uint8, is the source's domain and token, int32 each.
    """
    num_ranks, num_domains = ep.num_ranks, ep.num_rdma_ranks
    num_rows = routing.num_worst_tokens or routing.core.num_recv_tokens
    source = source_ranks(routing, num_ranks)
    ranks = torch.arange(num_ranks, dtype=source.dtype, device=source.device)
    psum = torch.searchsorted(source, ranks, right=True, out_int32=True)
    token_id = routing.core.recv_src_metadata[:, 0]
    src_idx = (token_id % routing.core.num_max_tokens_per_rank)[:num_rows]
    key = _make_key(routing)
    if num_domains == 1:
        prefix_matrix = psum.new_zeros((num_ranks, num_ranks))
        prefix_matrix[:, ep.rank_idx] = psum
        no_channels = psum.new_empty((num_ranks, 0))
        return prefix_matrix, no_channels, no_channels, src_idx, is_token_in_rank, key
    ranks_per_domain = num_ranks // num_domains
    src_meta = torch.stack((source[:num_rows] // ranks_per_domain, src_idx), dim=1)
    of_domains, of_ranks = psum.new_empty((num_domains, 0)), psum.new_empty((num_ranks, 0))
    psum_domains = psum[ranks_per_domain - 1 :: ranks_per_domain].contiguous()
    send_head = psum.new_empty((len(is_token_in_rank), 0))
    return (
        *(is_token_in_rank, of_domains, of_ranks, of_domains, psum_domains),
        *(of_ranks, psum, src_meta.view(torch.uint8), send_head, key),
    )


def source_ranks(routing: Routing, num_ranks: int) -> torch.Tensor:
    """`[rows]` int32, ascending: where each row comes from; `num_ranks` for rows past the received.

    There are the rows of `EPBuffer`, which may be more than `num_worst_tokens`.
    """
    core = routing.core
    source = core.recv_src_metadata[:, 0] // core.num_max_tokens_per_rank
    if routing.num_worst_tokens == 0:
        return source
    num_received = core.psum_num_recv_tokens_per_scaleup_rank[-1]
    is_received = torch.arange(len(source), device=source.device) < num_received
    return source.masked_fill(~is_received, num_ranks)


def check_handle(handle: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The `is_token_in_rank` of a handle, `[T, R]` bool.

    Raises:
        TypeError, ContractError: It is no handle.
    """
    if not isinstance(handle, tuple | list):
        raise TypeError(f"handle must be the tuple of a dispatch, got {type(handle).__name__}")
    if not all(isinstance(part, torch.Tensor) for part in handle):
        raise TypeError("handle must be the tuple of a dispatch, got one with other than tensors")
    if len(handle) not in (_LEN_ONE_DOMAIN, _LEN_DOMAINS) or handle[-1].shape != (2,):
        raise ContractError(f"handle must be the tuple of a dispatch, got {len(handle)} tensors")
    return handle[4] if len(handle) == _LEN_ONE_DOMAIN else handle[0]


def find_routing(handle: tuple[torch.Tensor, ...], rebuild: Callable[[int], Routing]) -> Routing:
    """The routing of a handle.

    Args:
        handle: A checked one.
        rebuild: Makes the routing of this `num_worst_tokens` again. Needed when only copies of the
            key are left, e.g. of tensors that autograd offloaded; collective.
    """
    name, num_worst_tokens = handle[-1].tolist()
    memory = _routings.get(name)
    return rebuild(num_worst_tokens) if memory is None else memory.routing


def _make_key(routing: Routing) -> torch.Tensor:
    name = secrets.randbits(63)  # no other process has it
    numbers = (name, routing.num_worst_tokens)
    memory = _KeyMemory(b"".join(number.to_bytes(8, "little") for number in numbers))
    memory.routing = routing
    _routings[name] = memory
    return torch.frombuffer(memory, dtype=torch.int64)
