"""The three runs of the demo: over ranks, in one process with the same roundings, and in FP32."""

from __future__ import annotations

from typing import Protocol

import torch

from deep_ep.bench.ranks import run_ranks

from .distributed import RankRun, train_on_rank
from .local_exchange import RoundedExchange, exact_exchange
from .model import Exchange, ModelShape, Replica, make_experts
from .text import Text
from .train import Run, Settings, train


class Progress(Protocol):
    """What a run needs of a tqdm bar."""

    def update(self, n: int = 1) -> object: ...

    def set_postfix_str(self, s: str, refresh: bool = True) -> object: ...


def make_settings(num_ranks: int, num_steps: int) -> Settings:
    """16 experts and 16 sequences, or the next multiple of the ranks."""
    multiple = -(-16 // num_ranks) * num_ranks
    return Settings(ModelShape(num_experts=multiple), num_ranks, num_steps, multiple)


def over_ranks(
    settings: Settings, inject_error_at_step: int | None, progress: Progress
) -> list[RankRun]:
    """Trains in one process a rank."""

    def on_report(rank_idx: int, loss: float) -> None:
        if rank_idx == 0:
            _show(progress, loss)

    args = (settings, inject_error_at_step)
    return run_ranks(train_on_rank, settings.num_ranks, args, on_report)


def in_one_process(settings: Settings, text: Text, progress: Progress) -> Run:
    """Trains on the same shards here, rounding where dispatch and combine round."""
    return _train_here(
        settings, text, settings.num_ranks, RoundedExchange(settings.num_ranks), progress
    )


def in_fp32(settings: Settings, text: Text, progress: Progress) -> Run:
    """Trains on whole batches here, in FP32 throughout."""
    return _train_here(settings, text, 1, exact_exchange, progress)


def _train_here(
    settings: Settings, text: Text, num_shards: int, exchange: Exchange, progress: Progress
) -> Run:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(
            settings,
            text,
            [Replica(settings.shape) for _ in range(num_shards)],
            range(num_shards),
            make_experts(settings.shape, 0, settings.shape.num_experts),
            0,
            exchange,
            lambda vectors: vectors,
            lambda _, loss: _show(progress, loss),
        )
    finally:
        torch.set_num_threads(num_threads)


def _show(progress: Progress, loss: float) -> None:
    progress.set_postfix_str(f"loss {loss:.3f}", refresh=False)
    progress.update()
