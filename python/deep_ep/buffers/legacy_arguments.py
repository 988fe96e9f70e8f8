"""The rules for arguments of V1's throughput calls. Letters as in `legacy_throughput`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deep_ep._core import ContractError
from deep_ep.buffers.legacy_config import Config
from deep_ep.buffers.legacy_routing import MAX_LANES, Layout, layout_of

if TYPE_CHECKING:
    from deep_ep.buffers.ep import EPBuffer, Input

__all__ = ["check_routed", "check_rows", "num_sms_of", "require_weights", "split_x"]


def num_sms_of(config: Config | None, default: Config) -> int:
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config must be a Config or None, got {type(config).__name__}")
    num_sms = (config or default).num_sms
    if num_sms % 2 != 0:
        raise ContractError(f"num_sms must be even, got {num_sms}")
    return num_sms


def split_x(x: Input) -> tuple[torch.Tensor, torch.Tensor | None]:
    x, x_sf = x if isinstance(x, tuple) and len(x) == 2 else (x, None)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a tensor or a pair of such, got {type(x).__name__}")
    if x.dim() != 2 or not x.is_contiguous():
        raise ContractError(
            f"x must be a contiguous matrix, got shape {list(x.shape)}, strides {x.stride()}"
        )
    if x_sf is None and x.dtype != torch.bfloat16:
        raise ContractError(f"x without scales must be bfloat16, got {x.dtype}")
    if x_sf is None:
        return x, None
    if not isinstance(x_sf, torch.Tensor):
        raise TypeError(f"scales must be a tensor, got {type(x_sf).__name__}")
    is_word = x_sf.dtype in (torch.float32, torch.int32)
    if x_sf.dim() != 2 or len(x_sf) != len(x) or not is_word:
        raise ContractError(
            f"scales must be [{len(x)}, packs] float32 or int32, "
            f"got {list(x_sf.shape)} {x_sf.dtype}"
        )
    return x, x_sf


def check_routed(
    ep: EPBuffer,
    num_tokens: int,
    layout: Layout,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
) -> None:
    needed = ["num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert"]
    if ep.num_rdma_ranks > 1:
        needed.append("num_tokens_per_rdma_rank")
    missing = [name for name in needed if getattr(layout, name) is None]
    if missing:
        raise ContractError(f"{', '.join(missing)} must be given without a handle")
    if (topk_idx is None) != (topk_weights is None):
        raise ContractError("topk_idx and topk_weights must be given both or neither")
    if topk_idx is not None:
        if topk_idx.dim() != 2 or len(topk_idx) != num_tokens:
            raise ContractError(
                f"topk_idx must be [{num_tokens}, num_topk], got {list(topk_idx.shape)}"
            )
        require_weights(topk_weights, num_tokens)
    _require_layout(layout, num_tokens, topk_idx, ep.num_ranks)


def check_rows(
    ep: EPBuffer,
    num_tokens: int,
    topk_idx: torch.Tensor | None,
    expert_alignment: int,
    num_worst_tokens: int,
) -> None:
    if expert_alignment < 1:
        raise ContractError(f"expert_alignment must be at least 1, got {expert_alignment}")
    if num_worst_tokens == 0:
        return
    if num_worst_tokens < ep.num_ranks * num_tokens:
        raise ContractError(
            f"num_worst_tokens must be at least the {ep.num_ranks} ranks times the most tokens of "
            f"any rank, got {num_worst_tokens} for {num_tokens} tokens"
        )
    if topk_idx is None or ep.num_rdma_ranks > 1:
        raise ContractError("num_worst_tokens needs topk_idx and one scale-up domain")


def require_weights(weights: torch.Tensor, num_rows: int) -> None:
    if weights.dim() != 2 or len(weights) != num_rows or weights.dtype != torch.float32:
        raise ContractError(
            f"topk_weights must be [{num_rows}, num_topk] float32, "
            f"got {list(weights.shape)} {weights.dtype}"
        )
    if not weights.is_contiguous():
        raise ContractError(f"topk_weights must be contiguous, got strides {weights.stride()}")


def _require_layout(
    given: Layout, num_tokens: int, topk_idx: torch.Tensor | None, num_ranks: int
) -> None:
    """Raises unless the arguments of a dispatch can belong together.

    What only their contents tell is looked at on the CPU, where it costs no waiting.

    Raises:
        TypeError, ContractError: They can't.
    """
    experts, in_rank = given.num_tokens_per_expert, given.is_token_in_rank
    shapes = {
        "num_tokens_per_rank": (given.num_tokens_per_rank, torch.int32, (num_ranks,)),
        "num_tokens_per_expert": (experts, torch.int32, experts.shape[:1]),
        "is_token_in_rank": (in_rank, torch.bool, (num_tokens, num_ranks)),
    }
    for name, (tensor, dtype, shape) in shapes.items():
        if tensor.dtype != dtype or tensor.shape != shape:
            raise ContractError(
                f"{name} must be {list(shape)} {dtype}, got {list(tensor.shape)} {tensor.dtype}"
            )
    num_experts = len(experts)
    if num_experts == 0 or num_experts % num_ranks != 0:
        raise ContractError(
            f"num_tokens_per_expert must have a positive multiple of {num_ranks} experts, "
            f"got {num_experts}"
        )
    if not in_rank.is_cpu:
        return
    if not torch.equal(in_rank.sum(dim=0, dtype=torch.int32), given.num_tokens_per_rank):
        raise ContractError("num_tokens_per_rank must count the tokens of is_token_in_rank")
    if topk_idx is None:
        if bool((in_rank.sum(dim=1) > MAX_LANES).any()):
            raise ContractError(f"a token without topk_idx goes to at most {MAX_LANES} ranks")
        return
    expected = layout_of(topk_idx, num_experts, num_ranks, 1)
    if not torch.equal(expected.is_token_in_rank, in_rank):
        raise ContractError("is_token_in_rank must say where topk_idx leads")
    if not torch.equal(expected.num_tokens_per_expert, experts):
        raise ContractError("num_tokens_per_expert must count the lanes of topk_idx")
