"""`Config`: how much of a GPU and of a buffer a throughput call of V1 may use. Loads no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from deep_ep._core import ContractError
from deep_ep.utils.math import align, ceil_div

__all__ = ["Config", "default_config"]

# What the size hints of V1 assume: GPUs of a machine, and of a token the source, ids and weights.
_NVLINK_RANKS = 8
_MAX_TOPK = 128
_SOURCE_BYTES = 8

# The chunks of a dispatch and of a combine by the number of ranks: NVLink send, receive, RDMA send,
# receive.
_CHUNKS = {
    2: ((24, 256, 6, 128), (10, 256, 6, 128)),
    4: ((6, 256, 6, 128), (9, 256, 6, 128)),
    8: ((6, 256, 6, 128), (4, 256, 6, 128)),
    16: ((36, 288, 20, 128), (4, 288, 12, 128)),
    24: ((32, 288, 8, 128), (1, 288, 8, 128)),
    64: ((32, 288, 8, 128), (1, 288, 8, 128)),
    96: ((20, 480, 12, 128), (1, 480, 8, 128)),
    128: ((20, 560, 12, 128), (1, 560, 8, 128)),
    144: ((32, 720, 12, 128), (2, 720, 8, 128)),
    160: ((28, 720, 12, 128), (2, 720, 8, 128)),
}


@dataclass
class Config:
    """Settings of a throughput call.

    `num_sms` is the most SMs that a call of CUDA ranks uses. The chunks only size hints: rows move
    to their final place at once.

    Attributes:
        num_sms: An even number where it is used.
        num_max_nvl_chunked_send_tokens: Fewer than are received.
        num_max_nvl_chunked_recv_tokens:
        num_max_rdma_chunked_send_tokens: At most half of what is received.
        num_max_rdma_chunked_recv_tokens: Rounded up to a multiple of what is sent.

    Raises:
        ContractError: A number breaks its rule.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        if self.num_sms < 0:
            raise ContractError(f"num_sms must not be negative, got {self.num_sms}")
        nvl = self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        rdma = self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens
        if min(*nvl, *rdma) <= 0:
            raise ContractError(f"chunks must be positive, got {nvl} and {rdma}")
        if nvl[0] >= nvl[1]:
            raise ContractError(f"NVLink chunks must be sent smaller than received, got {nvl}")
        self.num_max_rdma_chunked_recv_tokens = align(rdma[1], rdma[0])
        if rdma[0] > self.num_max_rdma_chunked_recv_tokens // 2:
            raise ContractError(f"RDMA chunks must be sent at most half as received, got {rdma}")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """`num_nvl_bytes` of a buffer.

        Args:
            hidden_bytes: Bytes of a row of x, with two bytes an element at least.
            num_ranks: R.

        Returns:
            Bytes, a multiple of 128.
        """
        num_nodes = ceil_div(num_ranks, _NVLINK_RANKS)
        token_bytes = _token_bytes(hidden_bytes)
        per_rank = (2 * num_nodes + 3) * 4 + self.num_max_nvl_chunked_recv_tokens * token_bytes
        return align(self.num_sms // 2 * min(num_ranks, _NVLINK_RANKS) * per_rank, 128)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """`num_rdma_bytes` of a buffer: as above, 0 for up to 8 ranks."""
        if num_ranks <= _NVLINK_RANKS:
            return 0
        num_nodes = ceil_div(num_ranks, _NVLINK_RANKS)
        token_bytes = _token_bytes(hidden_bytes) + 16
        counts = (_NVLINK_RANKS * 2 + 2) * 2 * 4
        per_node = counts + self.num_max_rdma_chunked_recv_tokens * 2 * token_bytes
        return align(self.num_sms // 2 * num_nodes * per_node, 128)


def default_config(num_ranks: int, num_sms: int, *, is_combine: bool = False) -> Config:
    """The settings for a number of ranks: those of the smallest known group that is as large."""
    size = min((size for size in _CHUNKS if size >= num_ranks), default=max(_CHUNKS))
    return Config(num_sms, *_CHUNKS[size][is_combine])


def _token_bytes(hidden_bytes: int) -> int:
    idx_bytes = 4 if os.environ.get("EP_NUM_TOPK_IDX_BITS") == "32" else 8
    return hidden_bytes + _SOURCE_BYTES + _MAX_TOPK * (idx_bytes + 4 + 4)
