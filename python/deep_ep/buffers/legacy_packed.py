"""What V1's low-latency calls put around `EPBuffer`, on the device of their inputs.

The packed layout gives each local expert room for R * M rows, `[L, R * M, H]`, of which the first
are received: those of rank 0 in the order of its tokens, then those of rank 1, ... `EPBuffer` packs
them without room between experts; here is the way between both.

Letters: R ranks, E experts, L = E / R experts of a rank, T tokens of this rank, M the most tokens
of any rank, H hidden, K top-k, P scale packs of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deep_ep.buffers.ep import EPHandle, Input

__all__ = ["Packed", "PackedShape", "first_lanes", "quantise", "rows_in_packed", "weighted_sum"]

FP8_MAX = 448.0
# 1 / 448 as float32: the factors are products with it, not quotients.
_INVERSE_FP8_MAX = torch.tensor(1 / FP8_MAX, dtype=torch.float32).item()
_BLOCK = 128


@dataclass(frozen=True)
class PackedShape:
    """The numbers of a low-latency dispatch, with the letters of the module."""

    num_ranks: int
    num_local_experts: int
    num_max_tokens: int
    num_topk: int

    @property
    def num_experts(self) -> int:
        """E."""
        return self.num_ranks * self.num_local_experts

    @property
    def rows_per_expert(self) -> int:
        """R * M."""
        return self.num_ranks * self.num_max_tokens

    @property
    def num_rows(self) -> int:
        """L * R * M."""
        return self.num_local_experts * self.rows_per_expert


class Packed:
    """The results of a dispatch, there before their contents are.

    Attributes:
        x: `[L, R * M, H]`.
        x_sf: `[L, R * M, P]`, column-major in the last two dimensions; None without scales.
        count: `[L]` int32, received rows.
        src_info: `[L, R * M]` int32, the token of each row on its rank.
        layout_range: `[L, R]` int64: begin << 32 | count of each rank's rows.
    """

    def __init__(self, shape: PackedShape, data: torch.Tensor, sf: torch.Tensor | None) -> None:
        """Makes room for rows such as `data`, `[T, H]`, and `sf`, `[T, P]`."""
        self._shape = shape
        experts, rows = shape.num_local_experts, shape.rows_per_expert
        # One more row, or expert, takes what was not received.
        self._x = data.new_empty((shape.num_rows + 1, data.shape[1]))
        self._src_info = data.new_empty(shape.num_rows + 1, dtype=torch.int32)
        self.x = self._x[:-1].view(experts, rows, -1)
        self.src_info = self._src_info[:-1].view(experts, rows)
        self.count = data.new_empty(experts, dtype=torch.int32)
        self.layout_range = data.new_empty((experts, shape.num_ranks), dtype=torch.int64)
        self.x_sf = self._x_sf = None
        if sf is not None:
            self._x_sf = sf.new_empty((experts + 1, sf.shape[1], rows)).transpose(1, 2)
            self.x_sf = self._x_sf[:-1]

    def fill(self, recv_x: Input, core: EPHandle) -> torch.Tensor:
        """Takes what an expanded dispatch of single lanes received; returns `rows_in_packed`."""
        data, sf = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
        shape = self._shape
        packed_rows = rows_in_packed(core, shape, len(data))
        _words_of(self._x)[packed_rows] = _words_of(data)
        if sf is not None:
            expert = packed_rows // shape.rows_per_expert
            self._x_sf[expert, packed_rows % shape.rows_per_expert] = sf
        self.count.copy_(core.num_unaligned_recv_tokens_per_expert)
        self._fill_sources(core, packed_rows)
        return packed_rows

    def _fill_sources(self, core: EPHandle, packed_rows: torch.Tensor) -> None:
        shape, meta = self._shape, core.recv_src_metadata.long()
        num_received = core.psum_num_recv_tokens_per_scaleup_rank[-1]
        is_received = torch.arange(len(meta), device=meta.device) < num_received
        rows = packed_rows[torch.where(is_received, meta[:, 2], 0)]
        rows = torch.where(is_received, rows, shape.num_rows)
        lanes_per_rank = shape.num_max_tokens * shape.num_topk
        self._src_info[rows] = (meta[:, 0] % lanes_per_rank // shape.num_topk).int()
        segments = rows // shape.rows_per_expert * shape.num_ranks
        segments += torch.where(is_received, meta[:, 0] // lanes_per_rank, 0)
        counts = meta.new_zeros((shape.num_local_experts + 1) * shape.num_ranks)
        counts = counts.scatter_add_(0, segments, torch.ones_like(segments))
        counts = counts.view(-1, shape.num_ranks)[:-1]
        begins = counts.cumsum(dim=1) - counts
        self.layout_range.copy_((begins << 32) | counts)


def _words_of(rows: torch.Tensor) -> torch.Tensor:
    """The same bytes in elements as large as fit a row: copies by index go element by element."""
    row_bytes = rows.shape[1] * rows.element_size()
    return rows.view(torch.int64 if row_bytes % 8 == 0 else torch.uint8)


def rows_in_packed(core: EPHandle, shape: PackedShape, num_rows: int) -> torch.Tensor:
    """`[num_rows]` int64: where each row of `EPBuffer` is in `[L * R * M]`; that number if none."""
    ends = core.psum_num_recv_tokens_per_expert.long()
    rows = torch.arange(num_rows, device=ends.device)
    expert = torch.searchsorted(ends, rows, right=True)
    starts = ends - core.num_unaligned_recv_tokens_per_expert
    starts = torch.cat((starts, starts.new_zeros(1)))
    places = expert * shape.rows_per_expert + rows - starts[expert]
    return torch.where(expert < shape.num_local_experts, places, shape.num_rows)


def first_lanes(topk_idx: torch.Tensor) -> torch.Tensor:
    """`[T, K]` int64: the first lane of each token that has the same id as this one."""
    same = topk_idx.unsqueeze(2) == topk_idx.unsqueeze(1)
    return same.int().argmax(dim=2)


def quantise(
    x: torch.Tensor, round_scale: bool, use_ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[T, H]` as float8_e4m3fn, each block of 128 with its own factor; value = FP8 * factor.

    Args:
        x: `[T, H]` bfloat16, H a multiple of 128.
        round_scale: Factors are powers of two.
        use_ue8m0: Give only the exponents, four in an int32, the first lowest.

    Returns:
        FP8 values, and factors: `[T, H / 128]` float32 or `[T, H / 512]` int32.
    """
    num_tokens, hidden = x.shape
    blocks = x.float().view(num_tokens, hidden // _BLOCK, _BLOCK)
    amax = blocks.abs().amax(dim=2).clamp_(min=1e-4)
    factors = amax * _INVERSE_FP8_MAX
    if round_scale:
        # The exponent, and one more if there is any mantissa: rounded up. Then 2 ** -exponent.
        bits = factors.view(torch.int32)
        exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
        factors = (exponents << 23).view(torch.float32)
        scales = ((254 - exponents) << 23).view(torch.float32)
    else:
        scales = torch.full_like(amax, FP8_MAX) / amax  # a scalar would be a product
    values = (blocks * scales.unsqueeze(2)).clamp_(-FP8_MAX, FP8_MAX)
    values = values.view(num_tokens, hidden).to(torch.float8_e4m3fn)
    if use_ue8m0:
        return values, (factors.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
    return values, factors


def weighted_sum(
    rows: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    out: torch.Tensor,
) -> None:
    """Adds up the rows of each token, times their weights, lanes ascending, in float32.

    Products and sums are rounded one by one.

    Args:
        rows: `[T, K, H]` bfloat16, 0 in lanes without expert; of lanes with the same expert only
            the first is read.
        topk_idx: `[T, K]`; ids outside 0 .. E - 1 add nothing.
        topk_weights: `[T, K]` float32.
        num_experts: E.
        out: `[T, H]` bfloat16, receives the sums.
    """
    lanes = first_lanes(topk_idx)
    tokens = torch.arange(len(rows), device=rows.device)
    is_routed = (topk_idx >= 0) & (topk_idx < num_experts)
    weights = torch.where(is_routed, topk_weights, 0)  # times the zeros of a lane without expert
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for lane in range(topk_idx.shape[1]):
        total += rows[tokens, lanes[:, lane]].float().mul_(weights[:, lane : lane + 1])
    out.copy_(total)
