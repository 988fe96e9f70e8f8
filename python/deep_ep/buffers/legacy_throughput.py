"""The throughput calls of V1: layout, dispatch and combine for many tokens.

Letters: R ranks, E experts, L = E / R experts of a rank, T tokens of this rank, H hidden, K top-k,
P scale packs of a token, n rows that this rank receives. Expert e lives on rank e // L.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deep_ep._core import ContractError
from deep_ep.buffers.ep import EPBuffer, _refusing
from deep_ep.buffers.legacy_arguments import (
    check_routed,
    check_rows,
    num_sms_of,
    require_weights,
    split_x,
)
from deep_ep.buffers.legacy_config import Config, default_config
from deep_ep.buffers.legacy_exchange import (
    combine_rows,
    combine_weights,
    dispatch_cached,
    dispatch_lanes,
    dispatch_rows,
)
from deep_ep.buffers.legacy_handle import check_handle
from deep_ep.buffers.legacy_routing import Layout, layout_of
from deep_ep.buffers.legacy_stream import run_placed
from deep_ep.glue import outside_graphs
from deep_ep.utils.event import core_event_of

if TYPE_CHECKING:
    from deep_ep.buffers.ep import Bias, Input
    from deep_ep.utils.event import EventHandle, EventOverlap

    Handle = tuple[torch.Tensor, ...]
    Event = EventOverlap | EventHandle | None

__all__ = ["ThroughputCalls"]


class ThroughputCalls:
    """Part of `Buffer`.

    Calls are collective and come after what the current stream holds, and after `previous_event`.
    `async_finish`: the current stream does not wait, results are valid after a wait for the event;
    CPU ranks are done when a call returns. `allocate_on_comm_stream` has no effect.

    Errors are those of `EPBuffer`: TypeError and ContractError for bad arguments, RuntimeError with
    the same text on the other ranks; TimeoutError and RuntimeError for ranks that are missing.
    """

    _ep: EPBuffer
    num_sms: int

    @outside_graphs
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Where the tokens of this rank go. Local.

        Args:
            topk_idx: `[T, K]` int64 or int32; negative: no expert.
            num_experts: E, a multiple of R.
            previous_event: See the class, as for the rest.

        Returns:
            `(num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert,
            is_token_in_rank, event)`: int32 `[R]`, `[domains]` (None in one scale-up domain) and
            `[E]`, then bool `[T, R]`.
        """

        def call() -> tuple:
            ranks, domains = self._ep.num_ranks, self._ep.num_rdma_ranks
            layout = layout_of(topk_idx, num_experts, ranks, domains)
            return (
                layout.num_tokens_per_rank,
                layout.num_tokens_per_rdma_rank,
                layout.num_tokens_per_expert,
                layout.is_token_in_rank,
            )

        previous = core_event_of("previous_event", previous_event)
        results, event = run_placed(self._ep, call, (topk_idx,), previous, async_finish)
        return (*results, event)

    @outside_graphs
    def dispatch(
        self,
        x: Input,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Input,
        torch.Tensor | None,
        torch.Tensor | None,
        list[int] | None,
        Handle | None,
        EventOverlap,
    ]:
        """Sends each token to every rank that has one of its experts, once a rank. Collective.

        Args:
            x: `[T, H]` bfloat16, contiguous; or a tuple of `[T, H]` float8_e4m3fn, contiguous, and
                its scales `[T, P]`, float32 or int32, any strides.
            handle: Repeat the routing of that dispatch with another x of T tokens; the arguments
                up to `num_worst_tokens` must then not be given.
            num_tokens_per_rank: As `get_dispatch_layout` returned it, needed without `handle`, as
                are the next three.
            num_tokens_per_rdma_rank: Needed with several scale-up domains.
            is_token_in_rank:
            num_tokens_per_expert:
            topk_idx: `[T, K]` int64 or int32, contiguous: experts of each token, negative: none;
                optional.
            topk_weights: `[T, K]` float32, contiguous; goes with `topk_idx`.
            expert_alignment: The returned counts are rounded up to multiples of it.
            num_worst_tokens: Do not wait for the counts, return so many rows: at least R times the
                most tokens of any rank, equal on all ranks. Needs `topk_idx` and one scale-up
                domain. 0: as many rows as are received.
            config: Settings; None: `get_dispatch_config(R)`.
            previous_event: See the class, as for the rest.

        Returns:
            `(recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle,
            event)`; with `handle` four of them are None:

            recv_x: `[n, H]`, ordered by source rank, then token; or a tuple with its scales
                `[n, P]`; dtypes as sent.
            recv_topk_idx: `[n, K]`, dtype of `topk_idx`: local expert, -1 for one of another rank
                and in rows past the received ones. None if none were given.
            recv_topk_weights: `[n, K]` float32, 0 where the id is -1. None likewise.
            num_recv_tokens_per_expert_list: L numbers, aligned; `[]` with `num_worst_tokens`.
            handle: A tuple of tensors for combine and cached dispatches; see `legacy_handle`.
            event: `event.event` is None for a synchronous call: results are ready.
        """
        ep = self._ep
        with _refusing(ep._live_runtime("dispatch")):
            previous = core_event_of("previous_event", previous_event)
            num_sms = num_sms_of(config, default_config(ep.num_ranks, self.num_sms))
            x, x_sf = split_x(x)
            layout = Layout(
                num_tokens_per_rank,
                num_tokens_per_rdma_rank,
                num_tokens_per_expert,
                is_token_in_rank,
            )
            if handle is None:
                check_routed(ep, len(x), layout, topk_idx, topk_weights)
                check_rows(ep, len(x), topk_idx, expert_alignment, num_worst_tokens)
            elif topk_idx is not None or topk_weights is not None:
                raise ContractError("topk_idx and topk_weights do not go with a handle")
            else:
                check_handle(handle)

        def call() -> tuple:
            if handle is not None:
                return dispatch_cached(ep, x, x_sf, handle, num_sms)
            if topk_idx is None:
                return dispatch_rows(ep, x, x_sf, layout, expert_alignment, num_sms)
            return dispatch_lanes(
                *(ep, x, x_sf, layout, topk_idx, topk_weights),
                *(expert_alignment, num_worst_tokens, num_sms),
            )

        inputs = (x, x_sf, tuple(vars(layout).values()), topk_idx, topk_weights, handle)
        results, event = run_placed(ep, call, inputs, previous, async_finish)
        return (*results, event)

    def internode_dispatch(
        self,
        x: Input,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple:
        """The same as `dispatch`, which takes any number of scale-up domains."""
        return self.dispatch(
            *(x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank),
            *(num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, 0),
            *(config, previous_event, async_finish, allocate_on_comm_stream),
        )

    @outside_graphs
    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias | None = None,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Brings the rows back to their tokens' ranks and adds them up, unweighted. Collective.

        Sums run in float32, bias first, then ranks ascending, and are rounded to bfloat16 once.
        With several scale-up domains each domain's sum is rounded, then added likewise.

        Args:
            x: `[n, H]` bfloat16, contiguous, one row for each row of the dispatch.
            handle: Of the dispatch, or of any dispatch before.
            topk_weights: `[n, K]` float32, contiguous; optional, on all ranks or on none. With them
                a GPU is waited for, unless the dispatch had `num_worst_tokens`.
            bias: `[T, H]` bfloat16, contiguous, added to the sums; or a pair of such; optional.
            config: Settings; None: `get_combine_config(R)`.
            previous_event: See the class, as for the rest.

        Returns:
            `(combined_x, combined_topk_weights, event)`:

            combined_x: `[T, H]` bfloat16.
            combined_topk_weights: `[T, K]` float32: each lane added up over the ranks that the
                token went to, ascending. None if none were given.
            event: `event.event` is None for a synchronous call: results are ready.
        """
        ep = self._ep
        with _refusing(ep._live_runtime("combine")):
            previous = core_event_of("previous_event", previous_event)
            num_sms = num_sms_of(config, default_config(ep.num_ranks, self.num_sms))
            check_handle(handle)
            biases = tuple(bias) if isinstance(bias, tuple | list) else (bias, None)
            if len(biases) != 2:
                raise TypeError(f"bias must be None, a tensor or a pair, got {len(biases)}")
            if topk_weights is not None:
                require_weights(topk_weights, len(x))

        def call() -> tuple:
            weights = None if topk_weights is None else combine_weights(ep, topk_weights, handle)
            return combine_rows(ep, x, handle, biases, num_sms), weights

        inputs = (x, handle, topk_weights, biases)
        results, event = run_placed(ep, call, inputs, previous, async_finish)
        return (*results, event)

    internode_combine = combine
