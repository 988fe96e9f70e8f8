"""One dispatch and combine on one rank, every output compared with the oracle."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

import oracle
import problem as problems
from deep_ep import EPBuffer
from problem import Problem
from ranks import Rank


@dataclass(frozen=True)
class Call:
    """How dispatch and combine are called; small enough to send to another process."""

    do_expand: bool = False
    alignment: int = 1
    zero_padding: bool = False
    cpu_sync: bool = True
    tma_sf: bool = False
    weights: bool = True
    num_bias: int = 0
    num_sms: int = 0
    mode: str = "sync"  # sync, async, deferred
    lent_outputs: bool = False  # expert outputs written to memory that the buffer lent
    allow_hybrid_mode: bool = True
    multiple_reduction: bool = True
    deterministic: bool = False


class SuiteBuffer(EPBuffer):
    """Takes tensors from anywhere: the suites make theirs on the CPU."""

    def dispatch(self, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        return super().dispatch(*put_all(args), **{k: put_all(v) for k, v in kwargs.items()})

    def combine(self, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        return super().combine(*put_all(args), **{k: put_all(v) for k, v in kwargs.items()})


def make_buffer(rank: Rank, problem: Problem, call: Call | None = None, **options: object) -> Any:  # noqa: ANN401
    """A buffer with room for the problem."""
    call = call or Call()
    settings = {
        "num_max_tokens_per_rank": problem.max_tokens,
        "hidden": problem.hidden,
        "num_topk": problem.num_topk,
        "use_fp8_dispatch": problem.dtype == "fp8",
        "allow_hybrid_mode": call.allow_hybrid_mode,
        "allow_multiple_reduction": call.multiple_reduction,
        "deterministic": call.deterministic,
        "num_cpu_timeout_secs": 30,  # a test that hangs must say so soon
        "explicitly_destroy": True,
    }
    settings |= options
    return SuiteBuffer(
        rank.group, num_gpu_timeout_secs=settings["num_cpu_timeout_secs"], **settings
    )


def device() -> torch.device:
    """Where buffers lie by default, and what is passed to them."""
    return torch.device(os.environ.get("EP_DEVICE", "cpu"))


def put(tensor: Tensor) -> Tensor:
    """The tensor there, with the same strides; that very tensor if it is there already."""
    if tensor.device.type == device().type:
        return tensor
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device())
    return moved.copy_(tensor)


def put_all(value: Any) -> Any:  # noqa: ANN401
    """The same for a tuple; anything else as it is."""
    if type(value) is tuple:
        return tuple(map(put_all, value))
    return put(value) if isinstance(value, Tensor) else value


def put_tokens(tokens: oracle.Tokens) -> oracle.Tokens:
    """What a rank dispatches, there."""
    return replace(
        tokens,
        **{
            field.name: put(value)
            for field in fields(tokens)
            if isinstance(value := getattr(tokens, field.name), Tensor)
        },
    )


# --- comparing ------------------------------------------------------------------------------------


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes as integers of the element's size."""
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(size)


def check_same(what: str, actual: Tensor, expected: Tensor, rank: int) -> None:
    """Raises unless both are equal bit for bit; says at which row and element, and both values.

    Any NaN equals any other: which one a sum yields is not specified.
    """
    assert actual is not None, f"rank {rank}: {what}: nothing was returned"
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.dtype == expected.dtype, f"rank {rank}: {what}: {actual.dtype}"
    assert actual.shape == expected.shape, (
        f"rank {rank}: {what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    if torch.equal(bits(actual), bits(expected)):
        return
    differs = bits(actual) != bits(expected)
    if actual.dtype.is_floating_point and actual.element_size() > 1:
        differs &= ~(actual.isnan() & expected.isnan())
    places = differs.nonzero()
    if len(places) == 0:
        return
    first = tuple(places[0].tolist())
    rows = sorted({int(place[0]) for place in places})
    values = f"{actual.float()[first].item()!r}, expected {expected.float()[first].item()!r}"
    raise AssertionError(
        f"rank {rank}: {what}: {len(places)} elements in {len(rows)} of {len(actual)} rows differ, "
        f"rows {rows[:8]}; the first at {list(first)}: {values}"
    )


def check_dispatched(
    received: oracle.Received,
    outputs: Sequence[Any],
    rank: int,
    exchange: oracle.Exchange,
    call: Call,
) -> None:
    """Compares what dispatch returned with the oracle, and the shapes with the specification."""
    recv_x, recv_topk_idx, recv_topk_weights = outputs[:3]
    recv_x, recv_sf = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    layout = received.layout
    rows = len(layout.rows)
    allocated = rows if call.cpu_sync else worst_case_rows(exchange, call)
    assert len(recv_x) == allocated, f"rank {rank}: {len(recv_x)} rows, expected {allocated}"
    assert recv_x.is_contiguous()

    data_rows = [row for row, place in enumerate(layout.rows) if place is not None]
    kept = list(range(rows)) if call.zero_padding else data_rows

    def compare(what: str, actual: Tensor, expected: Tensor) -> None:
        assert len(actual) == allocated, f"rank {rank}: {what} has {len(actual)} rows"
        if len(kept) == rows:
            check_same(what, actual[:rows], expected, rank)
        else:
            check_same(what, actual[kept], expected[kept], rank)

    compare("recv_x", recv_x, received.x)
    if received.x_sf is None:
        assert recv_sf is None
    else:
        compare("recv_x scales", recv_sf, received.x_sf)
        check_scale_layout(recv_sf, call.tma_sf)
    if call.do_expand:
        assert recv_topk_idx is None
    else:
        compare("recv_topk_idx", recv_topk_idx, received.topk_idx)
    if received.topk_weights is None:
        assert recv_topk_weights is None
    else:
        compare("recv_topk_weights", recv_topk_weights, received.topk_weights)


def worst_case_rows(exchange: oracle.Exchange, call: Call) -> int:
    """Rows of an output whose counts the host does not know."""
    most = exchange.num_ranks * exchange.num_max_tokens_per_rank
    if not call.do_expand:
        return most
    lanes = min(exchange.num_topk, exchange.num_local_experts)
    padding = (call.alignment - 1) * exchange.num_local_experts
    return oracle.align(most * lanes + padding, call.alignment)


def check_scale_layout(scales: Tensor, tma: bool) -> None:
    rows, columns = scales.shape
    if rows < 2 or columns < 2:
        return  # strides of a dimension of one element say nothing
    expected = (1, oracle.align(rows, 4)) if tma else (columns, 1)
    assert scales.stride() == expected, f"strides {scales.stride()}, expected {expected}"


def check_handle(
    handle: Any,  # noqa: ANN401
    layout: oracle.Layout,
    rank: int,
    exchange: oracle.Exchange,
    call: Call,
    topk_idx: Tensor,
) -> None:
    """Compares every documented field of a handle with the oracle."""
    assert handle.do_expand == call.do_expand
    assert handle.num_experts == exchange.num_experts
    assert handle.expert_alignment == call.alignment
    assert handle.num_max_tokens_per_rank == exchange.num_max_tokens_per_rank
    assert handle.topk_idx is topk_idx
    num_recv = len(layout.recv_tokens)
    aligned = [oracle.align(count, call.alignment) for count in layout.counts]
    if call.cpu_sync:
        assert handle.num_recv_tokens == num_recv
        assert handle.num_expanded_tokens == layout.num_expanded == sum(aligned)
        assert handle.num_recv_tokens_per_expert_list == aligned
        assert all(type(count) is int for count in handle.num_recv_tokens_per_expert_list)
    else:
        most = exchange.num_ranks * exchange.num_max_tokens_per_rank
        assert handle.num_recv_tokens == most
        assert handle.num_expanded_tokens == worst_case_rows(
            exchange, replace(call, do_expand=True)
        )
        assert handle.num_recv_tokens_per_expert_list == []

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    psum_scaleup = handle.psum_num_recv_tokens_per_scaleup_rank
    assert int(psum_scaleup[-1]) == num_recv
    if exchange.num_domains == 1:  # of several domains only the total is specified
        check_same("psum scale-up", psum_scaleup, int32(layout.psum_scaleup), rank)
    psum_expert = handle.psum_num_recv_tokens_per_expert
    check_same("psum experts", psum_expert, int32(layout.psum_expert), rank)
    unaligned = handle.num_unaligned_recv_tokens_per_expert
    check_same("unaligned counts", unaligned, int32(layout.counts), rank)

    metadata = handle.recv_src_metadata
    columns = 2 + exchange.num_topk
    assert metadata.shape == (handle.num_recv_tokens, columns)
    used = columns if call.do_expand else 2  # compact: the rows of the lanes are unspecified
    expected = int32(layout.metadata).reshape(-1, columns)
    check_same("recv_src_metadata", metadata[:num_recv, :used], expected[:, :used], rank)


# --- calling --------------------------------------------------------------------------------------


def dispatch_arguments(
    tokens: oracle.Tokens, exchange: oracle.Exchange, call: Call
) -> dict[str, Any]:
    """Keyword arguments of a dispatch that makes a handle."""
    tokens = put_tokens(tokens)
    return {
        "x": tokens.x if tokens.x_sf is None else (tokens.x, tokens.x_sf),
        "topk_idx": tokens.topk_idx,
        "topk_weights": tokens.topk_weights,
        "num_experts": exchange.num_experts,
        "num_max_tokens_per_rank": exchange.num_max_tokens_per_rank,
        "expert_alignment": call.alignment,
        "num_sms": call.num_sms,
        "do_cpu_sync": call.cpu_sync,
        "do_expand": call.do_expand,
        "do_zero_padding": call.zero_padding,
        "use_tma_aligned_col_major_sf": call.tma_sf,
        "async_with_compute_stream": call.mode != "sync",
    }


def call_dispatch(buffer: Any, call: Call, **arguments: object) -> tuple:  # noqa: ANN401
    """Dispatches in the call's mode; returns the four results once they are ready."""
    if call.mode == "deferred":
        event = buffer.dispatch(**arguments, defer_epilogue=True)
        return tuple(event.wait())
    *results, event = buffer.dispatch(**arguments)
    assert (event.event is None) == (call.mode == "sync")
    if call.mode == "async":
        event.current_stream_wait()
    return tuple(results)


def call_combine(buffer: Any, call: Call, **arguments: object) -> tuple:  # noqa: ANN401
    """Combines in the call's mode; returns the two results once they are ready."""
    arguments["async_with_compute_stream"] = call.mode != "sync"
    if call.mode == "deferred":
        event = buffer.combine(**arguments, defer_epilogue=True)
        return tuple(event.wait())
    *results, event = buffer.combine(**arguments)
    assert (event.event is None) == (call.mode == "sync")
    if call.mode == "async":
        event.current_stream_wait()
    return tuple(results)


def check_dispatch(buffer: Any, rank: Rank, problem: Problem, call: Call) -> tuple:  # noqa: ANN401
    """Dispatches and compares everything; returns the four results."""
    exchange = problems.exchange_of(
        problem, weights=call.weights, allow_hybrid_mode=call.allow_hybrid_mode
    )
    tokens = exchange.tokens[rank.index]
    arguments = dispatch_arguments(tokens, exchange, call)
    results = call_dispatch(buffer, call, **arguments)
    received = oracle.dispatch(
        exchange, rank.index, do_expand=call.do_expand, alignment=call.alignment
    )
    check_dispatched(received, results, rank.index, exchange, call)
    layout = received.layout
    check_handle(results[3], layout, rank.index, exchange, call, arguments["topk_idx"])
    return results


def check_combine(
    buffer: Any,  # noqa: ANN401
    rank: Rank,
    problem: Problem,
    call: Call,
    handle: Any,  # noqa: ANN401
    hidden: int | None = None,
) -> tuple:
    """Combines made-up expert outputs and weights over a handle of this problem, and compares."""
    exchange = problems.exchange_of(problem, allow_hybrid_mode=call.allow_hybrid_mode)
    shape = {"do_expand": call.do_expand, "alignment": call.alignment}
    problem = replace(problem, hidden=hidden or problem.hidden)
    rows = [len(oracle.layout_of(exchange, r, **shape).rows) for r in range(rank.size)]
    outputs = [problems.expert_outputs(problem, r, rows[r]) for r in range(rank.size)]
    bias = problems.make_bias(problem, rank.index, call.num_bias)
    lanes = () if call.do_expand else (exchange.num_topk,)
    weights = [
        torch.rand(rows[r], *lanes, generator=problems.generator(problem.seed, r, 5))
        for r in range(rank.size)
    ]
    with_weights = call.weights and (call.multiple_reduction or not call.do_expand)

    allocated = rows[rank.index] if call.cpu_sync else worst_case_rows(exchange, call)
    x, own_weights = grown(outputs[rank.index], allocated), grown(weights[rank.index], allocated)
    if call.lent_outputs:
        lent = buffer.empty(x.shape, x.dtype)
        lent.copy_(x)
        x = lent
    combined, combined_weights = call_combine(
        buffer,
        call,
        x=x,
        handle=handle,
        topk_weights=own_weights if with_weights else None,
        bias=(None, *bias[:1], tuple(bias))[call.num_bias],
        num_sms=call.num_sms,
    )
    expected = oracle.combine(
        exchange,
        rank.index,
        outputs,
        multiple_reduction=call.multiple_reduction,
        bias=bias,
        **shape,
    )
    check_same("combined_x", combined, expected, rank.index)
    if with_weights:
        expected_weights = oracle.combine_weights(exchange, rank.index, weights, **shape)
        check_same("combined_topk_weights", combined_weights, expected_weights, rank.index)
    else:
        assert combined_weights is None
    return combined, combined_weights


def grown(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with rows added that nobody may read: NaN."""
    if len(tensor) == rows:
        return tensor
    tail = torch.full((rows - len(tensor), *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)
    return torch.cat([tensor, tail])


def check_round_trip(rank: Rank, problem: Problem, call: Call) -> None:
    """A rank function: buffer, dispatch, combine, destroy."""
    buffer = make_buffer(rank, problem, call)
    handle = check_dispatch(buffer, rank, problem, call)[3]
    check_combine(buffer, rank, problem, call, handle)
    buffer.destroy()
