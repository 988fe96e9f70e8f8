"""The training loop on one of N ranks: tokens travel by dispatch and combine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep import EPBuffer, autograd
from deep_ep.bench.ranks import Rank

from .model import Layer, Replica, Routed, make_experts, run_experts
from .text import load_text
from .train import Run, Settings, train


@dataclass
class Traffic:
    """Calls of one operation on this rank, waiting for the other ranks included.

    Attributes:
        num_calls: how many.
        num_bytes: dispatch: rows received. combine: rows read and rows written.
        seconds: time in the calls.
    """

    num_calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def add(self, num_bytes: int, start: float) -> None:
        """Counts a call that began at `start` and has just ended."""
        self.num_calls += 1
        self.num_bytes += num_bytes
        self.seconds += time.perf_counter() - start


@dataclass
class RankRun:
    """What a rank of the distributed run hands back."""

    run: Run
    dispatch: Traffic = field(default_factory=Traffic)
    combine: Traffic = field(default_factory=Traffic)


class _CountingBuffer(EPBuffer):
    """An EPBuffer that counts its traffic, forward and backward."""

    dispatch_traffic: Traffic
    combine_traffic: Traffic

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        start = time.perf_counter()
        outputs = super().dispatch(*args, **kwargs)
        self.dispatch_traffic.add(outputs[0].nbytes, start)
        return outputs

    def combine(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        start = time.perf_counter()
        outputs = super().combine(x, *args, **kwargs)
        self.combine_traffic.add(x.nbytes + outputs[0].nbytes, start)
        return outputs


class _BufferExchange:
    """Sends the tokens of one shard to the experts of all ranks."""

    def __init__(self, buffer: EPBuffer, num_experts: int, wrong_row_in_call: int | None) -> None:
        self._buffer, self._num_experts = buffer, num_experts
        self._wrong_row_in_call, self._num_calls = wrong_row_in_call, 0

    def __call__(self, layer: Layer, shards: Sequence[Routed]) -> list[Tensor]:
        (shard,) = shards
        rows, _, weights, handle = autograd.dispatch(
            self._buffer,
            shard.x.bfloat16(),
            topk_idx=shard.topk_idx,
            topk_weights=shard.topk_weights,
            num_experts=self._num_experts,
            do_expand=True,
        )
        if self._num_calls == self._wrong_row_in_call:
            rows = rows.roll(1, 0)
        self._num_calls += 1
        outputs = run_experts(layer, rows, weights, handle.num_recv_tokens_per_expert_list)
        # Outputs in the window are read by the other ranks in place.
        lent = self._buffer.empty(tuple(outputs.shape), torch.bfloat16)
        return [autograd.combine(self._buffer, lent.copy_(outputs), handle).float()]


def train_on_rank(rank: Rank, settings: Settings, inject_error_at_step: int | None) -> RankRun:
    """Trains on this rank; reports each step's loss.

    Args:
        rank: this rank.
        settings: shape and length of the run.
        inject_error_at_step: give experts wrong rows in this step, to see that it is noticed.
    """
    torch.set_num_threads(
        1
    )  # as in the one process: the threads of a matmul decide its order of sums
    shape = settings.shape
    num_local_experts = shape.num_experts // rank.num_ranks
    first_expert = rank.idx * num_local_experts
    buffer = _CountingBuffer(
        dist.group.WORLD,
        num_max_tokens_per_rank=settings.num_tokens // rank.num_ranks,
        hidden=shape.hidden,
        num_topk=shape.num_topk,
        allow_hybrid_mode=False,  # hybrid mode sums in another order
        explicitly_destroy=True,
    )
    result = RankRun(Run())
    buffer.dispatch_traffic, buffer.combine_traffic = result.dispatch, result.combine
    wrong_call = None if inject_error_at_step is None else inject_error_at_step * shape.num_layers

    def gather(vectors: list[Tensor]) -> list[Tensor]:
        (vector,) = vectors
        gathered = [torch.empty_like(vector) for _ in range(rank.num_ranks)]
        dist.all_gather(gathered, vector)
        return gathered

    result.run = train(
        settings,
        load_text(),
        [Replica(shape)],
        [rank.idx],
        make_experts(shape, first_expert, num_local_experts),
        first_expert,
        _BufferExchange(buffer, shape.num_experts, wrong_call),
        gather,
        lambda _, loss: rank.report(loss),
    )
    buffer.destroy()
    return result
