"""`EPHandle`: the routing of one dispatch. Letters as in `deep_ep.buffers.ep`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from deep_ep import _core
from deep_ep._core import ContractError
from deep_ep.glue import load_torch_glue

if TYPE_CHECKING:
    import torch

__all__ = ["EPHandle"]


class EPHandle:
    """The routing of one dispatch: what combine and cached dispatches of the same tokens need.

    It may be used any number of times, also after other calls, and is freed with its last
    reference. Rows are ordered by source rank, then token, also with several scale-up domains: of
    `psum_num_recv_tokens_per_scaleup_rank` then only the last entry bounds rows. Tensors of an
    asynchronous dispatch are valid once its event is done.
    """

    def __init__(self, core: _core.EPHandle, topk_idx: torch.Tensor) -> None:
        self._core = core
        self._topk_idx = topk_idx
        self._topk_idx_version = _version_of(topk_idx)

    @property
    def topk_idx(self) -> torch.Tensor:
        """The very tensor that was dispatched with, `[T, K]`.

        Raises:
            ContractError: It was modified since.
        """
        if _version_of(self._topk_idx) != self._topk_idx_version:
            raise ContractError("topk_idx must not be modified while the EP handle is in use")
        return self._topk_idx

    @property
    def do_expand(self) -> bool:
        """Whether there is one row for each pair of token and local expert."""
        return self._core.do_expand

    @property
    def num_experts(self) -> int:
        """E, over all ranks."""
        return self._core.num_experts

    @property
    def expert_alignment(self) -> int:
        """A: rows of an expert are counted, and start if expanded, in multiples of it."""
        return self._core.expert_alignment

    @property
    def num_max_tokens_per_rank(self) -> int:
        """M."""
        return self._core.num_max_tokens_per_rank

    @property
    def num_sms(self) -> int:
        """The number given to the dispatch, rounded up to even, or its estimate."""
        return self._core.num_sms

    @property
    def num_recv_tokens(self) -> int:
        """N, or `R * M` without CPU sync."""
        return self._core.num_recv_tokens

    @property
    def num_expanded_tokens(self) -> int:
        """The sum of aligned expert counts, or its worst case without CPU sync."""
        return self._core.num_expanded_tokens

    @cached_property
    def num_recv_tokens_per_expert_list(self) -> list[int]:
        """Received tokens of each local expert, aligned, L numbers; empty without CPU sync."""
        return self._core.num_recv_tokens_per_expert_list

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        """`[scale-up ranks]` int32: inclusive prefix sum of received tokens by source, up to N."""
        return self._tensor("psum_num_recv_tokens_per_scaleup_rank")

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """`[L]` int32: inclusive prefix sum of aligned counts; expanded: end of each expert's rows.

        Expanded rows of expert e start at the end of expert e - 1, rounded up to the alignment.
        """
        return self._tensor("psum_num_recv_tokens_per_expert")

    @cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        """`[L]` int32: received tokens of each local expert."""
        return self._tensor("num_unaligned_recv_tokens_per_expert")

    @cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """`[N, K + 2]` int32 (`R * M` rows without CPU sync), one row a received token.

        Global token id; source rank * K + highest lane on this rank; the row of each lane in an
        expanded output (unspecified if compact), -1 for lanes on other ranks.
        """
        return self._tensor("recv_src_metadata")

    @cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """`[T, K]` int32: the row of each lane in the output of its expert's rank, -1 if none."""
        return self._tensor("dst_rows")

    def _tensor(self, name: str) -> torch.Tensor:
        return load_torch_glue("EPHandle").to_torch(getattr(self._core, name))


def _version_of(tensor: torch.Tensor) -> int | None:
    """Counts the changes of a tensor; None for inference tensors, which do not."""
    return None if tensor.is_inference() else tensor._version
