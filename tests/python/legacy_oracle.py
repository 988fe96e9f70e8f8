"""What the calls of V1 must return: slow, obvious, and bit for bit, written from the specification.

Letters: R ranks, E experts, L = E / R experts a rank, T tokens of a rank, M the most tokens of any
rank (low latency), K top-k, H hidden. `tokens[s]` is what rank s passes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle import Tokens


def ranks_of(ids: list[int], num_local: int) -> list[int]:
    """The ranks that a token goes to, ascending."""
    return sorted({expert // num_local for expert in ids if expert >= 0})


# --- throughput -----------------------------------------------------------------------------------


@dataclass
class Layout:
    per_rank: list[int]
    per_domain: list[int]
    per_expert: list[int]
    is_token_in_rank: list[list[bool]]


def layout(topk_idx: Tensor, num_experts: int, num_ranks: int, num_domains: int) -> Layout:
    made = Layout([0] * num_ranks, [0] * num_domains, [0] * num_experts, [])
    num_local, ranks_per_domain = num_experts // num_ranks, num_ranks // num_domains
    for ids in topk_idx.tolist():
        ranks = ranks_of(ids, num_local)
        for rank in ranks:
            made.per_rank[rank] += 1
        for domain in {rank // ranks_per_domain for rank in ranks}:
            made.per_domain[domain] += 1
        for expert in ids:
            if expert >= 0:
                made.per_expert[expert] += 1
        made.is_token_in_rank.append([rank in ranks for rank in range(num_ranks)])
    return made


@dataclass
class Received:
    places: list[tuple[int, int]]  # source and token of each row
    x: Tensor
    x_sf: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    counts: list[int]  # of the local experts, unaligned
    psum: list[int]  # rows from the ranks up to each


def dispatch(tokens: Sequence[Tokens], num_experts: int, rank: int) -> Received:
    num_ranks = len(tokens)
    num_local = num_experts // num_ranks
    places, ids_of_rows, weights_of_rows = [], [], []
    counts, psum = [0] * num_local, []
    for source, sent in enumerate(tokens):
        weights = sent.topk_weights.tolist()
        for token, ids in enumerate(sent.topk_idx.tolist()):
            if rank not in ranks_of(ids, num_local):
                continue
            places.append((source, token))
            local = [e - rank * num_local if e >= 0 and e // num_local == rank else -1 for e in ids]
            ids_of_rows.append(local)
            pairs = zip(local, weights[token], strict=True)
            weights_of_rows.append([w if e >= 0 else 0.0 for e, w in pairs])
            for expert in local:
                if expert >= 0:
                    counts[expert] += 1
        psum.append(len(places))
    num_topk, own = tokens[rank].topk_idx.shape[1], tokens[rank]
    rows = [tokens[source].x[token] for source, token in places]
    scales = None
    if own.x_sf is not None:
        scales = stacked([tokens[s].x_sf[t] for s, t in places], own.x_sf)
    return Received(
        places=places,
        x=stacked(rows, own.x),
        x_sf=scales,
        topk_idx=torch.tensor(ids_of_rows, dtype=own.topk_idx.dtype).view(-1, num_topk),
        topk_weights=torch.tensor(weights_of_rows, dtype=torch.float32).view(-1, num_topk),
        counts=counts,
        psum=psum,
    )


def stacked(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(rows) if rows else like.new_empty((0, like.shape[1]))


def combine(
    tokens: Sequence[Tokens],
    num_experts: int,
    rank: int,
    outputs: Sequence[Tensor],
    num_domains: int,
    bias: Sequence[Tensor] = (),
) -> Tensor:
    """`outputs[r]`: what rank r passes, a row for each received one."""
    row_of = rows_by_place(tokens, num_experts)
    num_ranks, num_local = len(tokens), num_experts // len(tokens)
    hidden = outputs[rank].shape[1]
    out = torch.zeros((len(tokens[rank].x), hidden), dtype=torch.bfloat16)
    for token, ids in enumerate(tokens[rank].topk_idx.tolist()):
        total = torch.zeros(hidden)
        for term in bias:
            total = total + term[token].float()
        ranks = ranks_of(ids, num_local)
        for domain in range(num_domains):
            of_domain = [r for r in ranks if r // (num_ranks // num_domains) == domain]
            rows = [outputs[r][row_of[r][rank, token]].float() for r in of_domain]
            if num_domains > 1 and rows:  # the domain's sum travels as bfloat16
                rows = [summed(rows).bfloat16().float()]
            for row in rows:
                total = total + row
        out[token] = total.bfloat16()
    return out


def combine_weights(
    tokens: Sequence[Tokens],
    num_experts: int,
    rank: int,
    weights: Sequence[Tensor],
    num_domains: int,
) -> Tensor:
    """`weights[r]`: what rank r passes, `[n, K]`; every lane counts, whoever has its expert."""
    row_of = rows_by_place(tokens, num_experts)
    num_ranks, num_local = len(tokens), num_experts // len(tokens)
    out = torch.zeros_like(tokens[rank].topk_weights)
    for token, ids in enumerate(tokens[rank].topk_idx.tolist()):
        ranks = ranks_of(ids, num_local)
        for domain in range(num_domains):
            of_domain = [r for r in ranks if r // (num_ranks // num_domains) == domain]
            rows = [weights[r][row_of[r][rank, token]] for r in of_domain]
            if rows:
                out[token] = out[token] + summed(rows)
    return out


def summed(rows: list[Tensor]) -> Tensor:
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total


def rows_by_place(tokens: Sequence[Tokens], num_experts: int) -> list[dict[tuple[int, int], int]]:
    return [
        {place: row for row, place in enumerate(dispatch(tokens, num_experts, r).places)}
        for r in range(len(tokens))
    ]


# --- low latency ----------------------------------------------------------------------------------


@dataclass
class Packed:
    """What one rank receives: for each local expert the rows of rank 0, then of rank 1, ..."""

    places: list[list[tuple[int, int]]]  # source and token, by local expert
    layout_range: list[list[int]]  # [L][R]: begin << 32 | count


def low_latency_layout(tokens: Sequence[Tokens], num_experts: int, rank: int) -> Packed:
    num_local = num_experts // len(tokens)
    made = Packed([], [])
    for local in range(num_local):
        expert = rank * num_local + local
        places: list[tuple[int, int]] = []
        ranges = []
        for source, sent in enumerate(tokens):
            begin = len(places)
            chosen = [t for t, ids in enumerate(sent.topk_idx.tolist()) if expert in ids]
            places += [(source, token) for token in chosen]
            ranges.append(begin << 32 | len(chosen))
        made.places.append(places)
        made.layout_range.append(ranges)
    return made


def low_latency_combine(
    tokens: Sequence[Tokens], num_experts: int, rank: int, outputs: Sequence[Tensor]
) -> Tensor:
    """`outputs[r]`: `[L, R * M, H]` of rank r. Product and sum are each rounded to float32."""
    num_local = num_experts // len(tokens)
    layouts = [low_latency_layout(tokens, num_experts, r) for r in range(len(tokens))]
    own = tokens[rank]
    out = torch.zeros((len(own.x), outputs[rank].shape[2]), dtype=torch.bfloat16)
    for token, ids in enumerate(own.topk_idx.tolist()):
        total = torch.zeros(out.shape[1])
        for lane, expert in enumerate(ids):
            if expert < 0:
                continue
            owner, local = expert // num_local, expert % num_local
            row = outputs[owner][local, layouts[owner].places[local].index((rank, token))]
            product = row.float() * own.topk_weights[token, lane]
            total = total + product
        out[token] = total.bfloat16()
    return out


def float32(value: float) -> float:
    """Rounded to nearest."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def float32_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def scale_of(values: list[float], round_scale: bool) -> tuple[float, float]:
    """What a block of 128 values is multiplied with, and the factor that undoes it."""
    amax = max(float32(1e-4), *(abs(value) for value in values))
    inverse = float32(amax * float32(1 / 448))
    if not round_scale:
        return float32(448 / amax), inverse
    bits = float32_bits(inverse)
    exponent = (bits >> 23) - 127 + (1 if bits & 0x7FFFFF else 0)
    return 2.0**-exponent, 2.0**exponent


FP8_VALUES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()


def to_fp8(value: float) -> int:
    """The code of the nearest float8_e4m3fn, ties to the even code, at most 448."""
    size = min(abs(value), 448.0)
    code = min(range(127), key=lambda c: (abs(FP8_VALUES[c] - size), c % 2))
    negative = struct.pack("<d", value)[7] & 0x80
    return code | negative


def cast(x: Tensor, round_scale: bool) -> tuple[Tensor, Tensor]:
    """`[T, H]` codes as uint8, and `[T, H / 128]` float32 factors that undo the scaling."""
    codes, factors = [], []
    for row in x.float().tolist():
        for start in range(0, len(row), 128):
            block = row[start : start + 128]
            scale, factor = scale_of(block, round_scale)
            codes += [to_fp8(float32(value * scale)) for value in block]
            factors.append(factor)
    num_tokens, hidden = x.shape
    return (
        torch.tensor(codes, dtype=torch.uint8).view(num_tokens, hidden),
        torch.tensor(factors, dtype=torch.float32).view(num_tokens, hidden // 128),
    )


def packed_exponents(factors: Tensor) -> Tensor:
    """`[T, H / 512]` int32: the exponents of four factors, the first one lowest."""
    rows = []
    for row in factors.tolist():
        exponents = [float32_bits(value) >> 23 for value in row]
        packs = [bytes(exponents[i : i + 4]) for i in range(0, len(exponents), 4)]
        rows.append([struct.unpack("<i", pack)[0] for pack in packs])
    return torch.tensor(rows, dtype=torch.int32).view(len(factors), factors.shape[1] // 4)
