"""Dispatch and combine as differentiable functions.

The gradient of a dispatch is a combine, and the gradient of a combine a cached dispatch, so **the
backward pass is collective too**: the outputs must reach the loss of every rank, also of one that
received no token, and ranks must call several of these functions in the same order.

    from deep_ep import EPBuffer
    from deep_ep.autograd import combine, dispatch

    def moe(buffer: EPBuffer, x: Tensor, probs: Tensor, experts: Experts) -> Tensor:
        topk_weights, topk_idx = probs.topk(8)
        rows, _, row_weights, handle = dispatch(
            buffer, x, topk_idx, topk_weights, num_experts=256, do_expand=True
        )
        outputs = experts(rows, handle.num_recv_tokens_per_expert_list) * row_weights[:, None]
        return combine(buffer, outputs.bfloat16(), handle)

Handles may be used for any number of these calls, forward or backward, in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    from .buffers.ep import Bias, EPBuffer, EPHandle

__all__ = ["combine", "dispatch"]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        buffer: EPBuffer,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, EPHandle]:
        recv_x, recv_topk_idx, recv_topk_weights, handle, _ = buffer.dispatch(
            x, topk_idx, topk_weights, **options
        )
        ctx.buffer, ctx.handle = buffer, handle
        if recv_topk_idx is not None:
            ctx.mark_non_differentiable(recv_topk_idx)
        return recv_x, recv_topk_idx, recv_topk_weights, handle

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx,
        grad_recv_x: torch.Tensor,
        _grad_recv_topk_idx: torch.Tensor | None,
        grad_recv_topk_weights: torch.Tensor | None,
        _grad_handle: None,
    ) -> tuple[torch.Tensor | None, ...]:
        # Always both, whichever gradient is wanted: the ranks must make the same call.
        if grad_recv_topk_weights is not None:
            grad_recv_topk_weights = grad_recv_topk_weights.contiguous()
        grad_x, grad_topk_weights, _ = ctx.buffer.combine(
            grad_recv_x.contiguous(), ctx.handle, grad_recv_topk_weights
        )
        return None, grad_x, None, grad_topk_weights, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        buffer: EPBuffer,
        x: torch.Tensor,
        handle: EPHandle,
        bias_0: torch.Tensor | None,
        bias_1: torch.Tensor | None,
        num_sms: int,
    ) -> torch.Tensor:
        ctx.buffer, ctx.handle, ctx.num_rows = buffer, handle, x.shape[0]
        return buffer.combine(x, handle, bias=(bias_0, bias_1), num_sms=num_sms)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x = ctx.buffer.dispatch(
            grad.contiguous(),
            handle=ctx.handle,
            do_expand=ctx.handle.do_expand,
            do_zero_padding=ctx.handle.do_expand,
        )[0]
        if ctx.num_rows > grad_x.shape[0]:  # combine read none of the rows beyond
            grad_x = torch.cat(
                [grad_x, grad_x.new_zeros(ctx.num_rows - len(grad_x), len(grad_x.T))]
            )
        biases = (grad if needed else None for needed in ctx.needs_input_grad[3:5])
        return None, grad_x, None, *biases, None


def dispatch(
    buffer: EPBuffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    *,
    num_experts: int | None = None,
    num_max_tokens_per_rank: int | None = None,
    expert_alignment: int | None = None,
    num_sms: int = 0,
    handle: EPHandle | None = None,
    do_cpu_sync: bool | None = None,
    do_expand: bool = False,
    do_zero_padding: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, EPHandle]:
    """`EPBuffer.dispatch`, synchronous, with gradients for `x` and `topk_weights`.

    Args:
        buffer: The buffer.
        x: `[T, H]` bfloat16, contiguous.
        topk_idx: As for `EPBuffer.dispatch`, as are all that follow.
        topk_weights: `[T, K]` float32, contiguous; optional. In its gradient lanes without expert
            are 0. In compact output the lanes of other ranks' experts get no gradient.
        num_experts: E.
        num_max_tokens_per_rank: M.
        expert_alignment: A.
        num_sms: The most worker threads.
        handle: Repeat the routing of that dispatch.
        do_cpu_sync: Exact shapes, or those of the worst case.
        do_expand: Expanded output.
        do_zero_padding: Zero the rows that alignment adds.

    Returns:
        `(recv_x, recv_topk_idx, recv_topk_weights, handle)`.

    Raises:
        As `EPBuffer.dispatch`; in the backward pass as `EPBuffer.combine`.
    """
    options = {
        "num_experts": num_experts,
        "num_max_tokens_per_rank": num_max_tokens_per_rank,
        "expert_alignment": expert_alignment,
        "num_sms": num_sms,
        "handle": handle,
        "do_cpu_sync": do_cpu_sync,
        "do_expand": do_expand,
        "do_zero_padding": do_zero_padding,
    }
    return _Dispatch.apply(buffer, x, topk_idx, topk_weights, options)


def combine(
    buffer: EPBuffer,
    x: torch.Tensor,
    handle: EPHandle,
    *,
    bias: Bias | None = None,
    num_sms: int = 0,
) -> torch.Tensor:
    """`EPBuffer.combine`, synchronous, with gradients for `x` and `bias`.

    The gradient of padding rows of an expanded `x` is 0. After a dispatch without CPU sync, rows of
    the gradient past the received ones are unspecified, as were those of `recv_x`.

    Args:
        buffer: The buffer.
        x: `[n, H]` bfloat16, contiguous, one row for each row of the dispatch.
        handle: Of the dispatch.
        bias: `[T, H]` bfloat16, contiguous, or a tuple of two such; optional.
        num_sms: The most worker threads; 0: the handle's.

    Returns:
        `[T, H]` bfloat16.

    Raises:
        As `EPBuffer.combine`; in the backward pass as `EPBuffer.dispatch`.
    """
    if isinstance(bias, tuple) and len(bias) != 2:
        raise TypeError(f"bias must be None, a tensor or a tuple of 2, got {len(bias)}")
    bias_0, bias_1 = bias if isinstance(bias, tuple) else (bias, None)
    return _Combine.apply(buffer, x, handle, bias_0, bias_1, num_sms)
