"""Inputs for the tests: from a seed, the same everywhere, so that each rank can run the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import oracle

BACKENDS = ["cpu", "cuda"]  # every suite that takes `backend` runs on each of these


@dataclass(frozen=True)
class Problem:
    """A shape, a routing and a data type; hashable, and small enough to send to another process."""

    num_ranks: int = 2
    num_domains: int = 1
    tokens: int | tuple[int, ...] = 7  # of each rank
    num_max_tokens: int = 0  # 0: the most tokens of any rank
    hidden: int = 32
    num_topk: int = 4
    num_experts: int = 8
    dtype: str = "bf16"  # bf16, fp8
    num_sf: int = 3  # scale packs a token, for fp8
    sf_dtype: str = "fp32"  # fp32, ue8m0 (int32 of four exponents)
    sf_layout: str = "row"  # row, column, tma, strided
    routing: str = "random"  # random, masked, duplicates, hot, last, none
    seed: int = 0

    @property
    def num_tokens(self) -> tuple[int, ...]:
        return (self.tokens,) * self.num_ranks if isinstance(self.tokens, int) else self.tokens

    @property
    def max_tokens(self) -> int:
        return self.num_max_tokens or max(1, *self.num_tokens)

    def rerouted(self, seed: int) -> Problem:
        return replace(self, seed=seed)

    def logical_domains(self, allow_hybrid_mode: bool) -> int:
        return self.num_domains if allow_hybrid_mode else 1


# The sizes of real models, in this one place. Everything else in the suite is small.
REAL_PROBLEM = Problem(num_ranks=2, tokens=4096, hidden=7168, num_topk=8, num_experts=256)
REAL_LARGEST_BATCH = Problem(num_ranks=2, tokens=8192, hidden=7168, num_topk=8, num_experts=256)
REAL_HIDDEN_SIZES = (1536, 2048, 2560, 2880, 5120, 6144, 7168, 8192)


def generator(*seeds: int) -> torch.Generator:
    """A random stream of its own for each combination of seeds."""
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed + 1) % (1 << 62)
    return torch.Generator().manual_seed(mixed)


def make_x(num_tokens: int, hidden: int, dtype: str, random: torch.Generator) -> Tensor:
    if dtype == "fp8":
        data = torch.randint(0, 256, (num_tokens, hidden), dtype=torch.uint8, generator=random)
        return data.view(torch.float8_e4m3fn)
    return torch.randn(num_tokens, hidden, generator=random).to(torch.bfloat16)


def make_terms(num_tokens: int, hidden: int, random: torch.Generator) -> Tensor:
    """Rows whose sums tell in which order they were added.

    Half of the values are +-2^25: a small one that is added after a large one is lost, and comes
    through when the large ones have cancelled before. Equal magnitudes would hide the order.
    """
    small = torch.randn(num_tokens, hidden, generator=random)
    large = torch.rand(num_tokens, hidden, generator=random) < 0.5
    return torch.where(large, small.sign() * 2.0**25, small).to(torch.bfloat16)


def make_scales(problem: Problem, num_tokens: int, random: torch.Generator) -> Tensor:
    shape = (num_tokens, problem.num_sf)
    if problem.sf_dtype == "ue8m0":
        low, high = -(1 << 31), 1 << 31
        scales = torch.randint(low, high, shape, generator=random).to(torch.int32)
    else:
        scales = torch.rand(shape, generator=random)
    return strided(scales, problem.sf_layout)


def strided(scales: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout."""
    rows, columns = scales.shape
    if layout == "row":
        return scales
    if layout == "strided":
        wide = torch.full((rows, 2 * columns + 1), 77, dtype=scales.dtype)
        view = wide[:, 1::2][:, :columns]
    else:
        padded = rows if layout == "column" else oracle.align(rows, 4)
        view = torch.full((columns, padded), 77, dtype=scales.dtype).t()[:rows]
    view.copy_(scales)
    return view


def make_topk_idx(problem: Problem, num_tokens: int, random: torch.Generator) -> Tensor:
    experts, shape = problem.num_experts, (num_tokens, problem.num_topk)
    routing = problem.routing
    if routing == "none":
        return torch.full(shape, -1, dtype=torch.int64)
    if routing == "hot":
        return torch.zeros(shape, dtype=torch.int64) + torch.where(
            torch.arange(problem.num_topk) == 0, 0, -1
        )
    if routing == "last":  # everything goes to the last rank
        first = experts - experts // problem.num_ranks
        return torch.randint(first, experts, shape, generator=random)
    if routing == "duplicates":
        return torch.randint(-1, experts, shape, generator=random)
    scores = torch.rand(num_tokens, max(experts, problem.num_topk), generator=random)
    idx = scores.argsort(dim=1)[:, : problem.num_topk].contiguous()
    idx[idx >= experts] = -1
    if routing == "masked":
        idx[torch.rand(shape, generator=random) < 0.4] = -1
        if num_tokens > 1:
            idx[0] = -1
    return idx


@oracle.computed_once
def tokens_of(problem: Problem) -> tuple[oracle.Tokens, ...]:
    """What each rank passes to dispatch. Shared: do not write into it."""
    made = []
    for rank, count in enumerate(problem.num_tokens):
        random = generator(problem.seed, rank)
        topk_idx = make_topk_idx(problem, count, random)
        made.append(
            oracle.Tokens(
                x=make_x(count, problem.hidden, problem.dtype, random),
                topk_idx=topk_idx,
                topk_weights=torch.rand(topk_idx.shape, generator=random),
                x_sf=make_scales(problem, count, random) if problem.dtype == "fp8" else None,
            )
        )
    return tuple(made)


@oracle.computed_once
def exchange_of(
    problem: Problem, *, weights: bool = True, allow_hybrid_mode: bool = True
) -> oracle.Exchange:
    tokens: Sequence[oracle.Tokens] = tokens_of(problem)
    if not weights:
        tokens = [replace(t, topk_weights=None) for t in tokens]
    return oracle.Exchange(
        tokens=tokens,
        num_experts=problem.num_experts,
        num_max_tokens_per_rank=problem.max_tokens,
        num_domains=problem.logical_domains(allow_hybrid_mode),
    )


def expert_outputs(problem: Problem, rank: int, num_rows: int, hidden: int | None = None) -> Tensor:
    """Rows that rank `rank` passes to combine."""
    random = generator(problem.seed, rank, 17)
    return make_terms(num_rows, hidden or problem.hidden, random)


def make_bias(problem: Problem, rank: int, count: int) -> list[Tensor]:
    tokens, hidden = problem.num_tokens[rank], problem.hidden
    return [make_terms(tokens, hidden, generator(problem.seed, rank, 31 + b)) for b in range(count)]
