"""What dispatch and combine must return: slow, obvious, and bit for bit.

Written from the specification alone, so that it shares no mistake with the library. Letters:
R ranks, E experts, L = E / R experts a rank, T tokens of a rank, M the most tokens of any
rank, K top-k.
Received rows are ordered by (source rank, token), inside an expert by (source rank, token, lane).
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def computed_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Ranks that are threads share what each of them would compute."""
    lock = threading.RLock()
    remembered = functools.lru_cache(maxsize=64)(function)

    @functools.wraps(function)
    def call(*args: object, **options: object) -> object:
        with lock:
            return remembered(*args, **options)

    return call


def align(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True, eq=False)
class Tokens:
    """What one rank passes to dispatch."""

    x: Tensor  # [T, H]
    topk_idx: Tensor  # [T, K], negative: no expert
    x_sf: Tensor | None = None  # [T, P]
    topk_weights: Tensor | None = None  # [T, K]


@dataclass(frozen=True, eq=False)
class Exchange:
    """One dispatch and combine over all ranks: everybody's tokens, and the shape of the group."""

    tokens: Sequence[Tokens]  # by rank
    num_experts: int
    num_max_tokens_per_rank: int
    num_domains: int = 1  # the scale-up domains that the routing tells apart

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def num_local_experts(self) -> int:
        assert self.num_experts % self.num_ranks == 0
        return self.num_experts // self.num_ranks

    @property
    def num_topk(self) -> int:
        return self.tokens[0].topk_idx.shape[1]

    @property
    def num_scaleup_ranks(self) -> int:
        return self.num_ranks // self.num_domains

    def rank_of(self, expert: int) -> int:
        return expert // self.num_local_experts

    def domain_of(self, rank: int) -> int:
        return rank // self.num_scaleup_ranks


@dataclass(frozen=True)
class Place:
    """Where a row comes from; `lane` is the slot in the token's row of experts."""

    source: int
    token: int
    lane: int = -1


@dataclass
class Layout:
    """The rows of one rank's output, and what its handle says about them."""

    rows: list[Place | None]  # None: a row that alignment adds
    row_of: dict[Place, int]
    recv_tokens: list[Place]  # [N], also when the rows are expanded
    counts: list[int]  # [L], unaligned
    psum_scaleup: list[int]  # [U]
    psum_expert: list[int]  # [L]
    metadata: list[list[int]]  # [N, K + 2]; compact: lanes hold no more than their sign
    num_expanded: int = 0
    padding: list[int] = field(default_factory=list)


@computed_once
def layout_of(exchange: Exchange, rank: int, *, do_expand: bool, alignment: int = 1) -> Layout:
    """Lays out what `rank` receives."""
    num_local, num_topk = exchange.num_local_experts, exchange.num_topk
    recv_tokens: list[Place] = []
    chosen: dict[int, list[Place]] = defaultdict(list)  # by local expert
    highest_lane: dict[Place, int] = {}
    for source, tokens in enumerate(exchange.tokens):
        for token, experts in enumerate(tokens.topk_idx.tolist()):
            here = [k for k, e in enumerate(experts) if e >= 0 and exchange.rank_of(e) == rank]
            if not here:
                continue
            place = Place(source, token)
            recv_tokens.append(place)
            highest_lane[place] = max(here)
            for lane in here:
                chosen[experts[lane] - rank * num_local].append(Place(source, token, lane))

    expanded: list[Place | None] = []
    ends: list[int] = []
    for expert in range(num_local):
        expanded += chosen[expert]
        ends.append(len(expanded))
        expanded += [None] * (align(len(expanded), alignment) - len(expanded))
    counts = [len(chosen[expert]) for expert in range(num_local)]

    rows: list[Place | None] = expanded if do_expand else list(recv_tokens)
    row_of = {place: row for row, place in enumerate(rows) if place is not None}
    return Layout(
        rows=rows,
        row_of=row_of,
        recv_tokens=recv_tokens,
        counts=counts,
        psum_scaleup=[
            sum(1 for p in recv_tokens if p.source % exchange.num_scaleup_ranks <= scaleup)
            for scaleup in range(exchange.num_scaleup_ranks)
        ],
        psum_expert=ends
        if do_expand
        else [sum(align(n, alignment) for n in counts[: e + 1]) for e in range(num_local)],
        metadata=[
            [
                p.source * exchange.num_max_tokens_per_rank + p.token,
                p.source * num_topk + highest_lane[p],
                *(row_of.get(Place(p.source, p.token, lane), -1) for lane in range(num_topk)),
            ]
            for p in recv_tokens
        ],
        num_expanded=len(expanded),
        padding=[row for row, place in enumerate(rows) if place is None],
    )


@dataclass
class Received:
    """What dispatch returns on one rank; rows that alignment adds are zeros."""

    layout: Layout
    x: Tensor
    x_sf: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None


def _rows(places: Iterable[Place | None], like: Tensor, value: Callable[[Place], Tensor]) -> Tensor:
    places = list(places)
    out = torch.zeros((len(places), *like.shape[1:]), dtype=like.dtype)
    for row, place in enumerate(places):
        if place is not None:
            out[row] = value(place)
    return out


def dispatch(
    exchange: Exchange, rank: int, *, do_expand: bool = False, alignment: int = 1
) -> Received:
    """What dispatch returns on `rank`, and what a cached dispatch with these tokens returns."""
    layout = layout_of(exchange, rank, do_expand=do_expand, alignment=alignment)
    tokens, first = exchange.tokens, exchange.tokens[rank]
    x = _rows(layout.rows, first.x, lambda p: tokens[p.source].x[p.token])
    x_sf = topk_idx = topk_weights = None
    if first.x_sf is not None:
        x_sf = _rows(layout.rows, first.x_sf, lambda p: _given(tokens[p.source].x_sf)[p.token])

    def local_ids(place: Place) -> Tensor:
        ids = tokens[place.source].topk_idx[place.token].tolist()
        first_expert = rank * exchange.num_local_experts
        here = [e >= 0 and exchange.rank_of(e) == rank for e in ids]
        return torch.tensor([e - first_expert if h else -1 for e, h in zip(ids, here, strict=True)])

    if not do_expand:
        topk_idx = _rows(layout.rows, first.topk_idx, local_ids)
    if first.topk_weights is not None:
        weights = [_given(t.topk_weights) for t in tokens]
        if do_expand:
            topk_weights = _rows(
                layout.rows,
                torch.empty(0, dtype=torch.float32),
                lambda p: weights[p.source][p.token, p.lane],
            )
        else:
            topk_weights = _rows(layout.rows, weights[rank], lambda p: weights[p.source][p.token])
    return Received(layout, x, x_sf, topk_idx, topk_weights)


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def ordered_sum(terms: Iterable[Tensor], hidden: int) -> Tensor:
    """Adds the terms one by one in float32, from +0, and rounds once to bfloat16."""
    total = torch.zeros(hidden, dtype=torch.float32)
    for term in terms:
        total = total + term.to(torch.float32)
    return total.to(torch.bfloat16)


def _by_highest_lane(lanes: Iterable[int], group_of: Callable[[int], int]) -> list[list[int]]:
    """The lanes group by group; a group stands at the place of its highest lane."""
    groups: dict[int, list[int]] = defaultdict(list)
    for lane in lanes:
        groups[group_of(lane)].append(lane)
    return sorted(groups.values(), key=max)


def combine(
    exchange: Exchange,
    rank: int,
    outputs: Sequence[Tensor],
    *,
    do_expand: bool = False,
    alignment: int = 1,
    multiple_reduction: bool = True,
    bias: Sequence[Tensor] = (),
) -> Tensor:
    """What combine returns on `rank`; `outputs[r]` is what rank r passes, a row a received row."""
    layouts = [
        layout_of(exchange, r, do_expand=do_expand, alignment=alignment)
        for r in range(exchange.num_ranks)
    ]
    hidden = outputs[rank].shape[1]
    topk_idx = exchange.tokens[rank].topk_idx.tolist()
    out = torch.zeros((len(topk_idx), hidden), dtype=torch.bfloat16)
    for token, experts in enumerate(topk_idx):
        valid = [lane for lane, expert in enumerate(experts) if expert >= 0]

        def owner(lane: int, experts: list[int] = experts) -> int:
            return exchange.rank_of(experts[lane])

        def expert_row(lane: int, token: int = token, owner: Callable = owner) -> Tensor:
            place = Place(rank, token, lane) if do_expand else Place(rank, token)
            return outputs[owner(lane)][layouts[owner(lane)].row_of[place]]

        def rank_row(lanes: list[int], expert_row: Callable = expert_row) -> Tensor:
            if not do_expand or len(lanes) == 1:
                return expert_row(lanes[0])
            return ordered_sum([expert_row(lane) for lane in lanes], hidden)

        def domain(lane: int, owner: Callable = owner) -> int:
            return exchange.domain_of(owner(lane))

        if do_expand and not multiple_reduction:
            terms = [expert_row(lane) for lane in valid]
        elif multiple_reduction and exchange.num_domains > 1:
            terms = [
                ordered_sum([rank_row(lanes) for lanes in _by_highest_lane(group, owner)], hidden)
                for group in _by_highest_lane(valid, domain)
            ]
        else:
            terms = [rank_row(lanes) for lanes in _by_highest_lane(valid, owner)]
        out[token] = ordered_sum([b[token] for b in bias] + terms, hidden)
    return out


def combine_weights(
    exchange: Exchange,
    rank: int,
    weights: Sequence[Tensor],
    *,
    do_expand: bool = False,
    alignment: int = 1,
) -> Tensor:
    """The weights that combine returns on `rank`: each lane's value on the rank of its expert."""
    topk_idx = exchange.tokens[rank].topk_idx.tolist()
    out = torch.zeros((len(topk_idx), exchange.num_topk), dtype=torch.float32)
    layouts = [
        layout_of(exchange, r, do_expand=do_expand, alignment=alignment)
        for r in range(exchange.num_ranks)
    ]
    for token, experts in enumerate(topk_idx):
        for lane, expert in enumerate(experts):
            if expert < 0:
                continue
            owner = exchange.rank_of(expert)
            if do_expand:
                out[token, lane] = weights[owner][layouts[owner].row_of[Place(rank, token, lane)]]
            else:
                out[token, lane] = weights[owner][layouts[owner].row_of[Place(rank, token)], lane]
    return out
