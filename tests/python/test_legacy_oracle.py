"""The oracle of V1 against results worked out by hand."""

from __future__ import annotations

import pytest
import torch

import legacy_oracle as oracle
from oracle import Tokens


def tokens(rows: list[list[int]], first: float) -> Tokens:
    count = len(rows)
    return Tokens(
        x=torch.arange(count).float().add(first).bfloat16()[:, None],
        topk_idx=torch.tensor(rows).view(count, 3),
        topk_weights=torch.arange(3 * count).float().view(count, 3) + 1,
    )


@pytest.fixture
def sent() -> list[Tokens]:
    """2 ranks, experts 0 1 | 2 3; rank 0 has tokens 1 2 3, rank 1 has tokens 8 9."""
    return [
        tokens([[0, 2, 1], [3, -1, 3], [-1, -1, -1]], 1),
        tokens([[1, 0, -1], [2, 1, 3]], 8),
    ]


def test_a_layout_counts_tokens_by_rank_and_lanes_by_expert(sent: list[Tokens]) -> None:
    made = oracle.layout(sent[0].topk_idx, 4, 2, 2)
    assert (made.per_rank, made.per_domain, made.per_expert) == ([1, 2], [1, 2], [1, 1, 1, 2])
    assert made.is_token_in_rank == [[True, True], [False, True], [False, False]]


def test_rows_come_by_source_and_token_and_see_local_lanes_only(sent: list[Tokens]) -> None:
    first, second = (oracle.dispatch(sent, 4, rank) for rank in range(2))
    assert first.x[:, 0].tolist() == [1, 8, 9]
    assert second.x[:, 0].tolist() == [1, 2, 9]
    assert first.topk_idx.tolist() == [[0, -1, 1], [1, 0, -1], [-1, 1, -1]]
    assert first.topk_weights.tolist() == [[1, 0, 3], [1, 2, 0], [0, 5, 0]]
    assert (first.counts, second.counts) == ([2, 3], [2, 3])
    assert (first.psum, second.psum) == ([1, 3], [2, 3])


def test_rows_are_added_rank_after_rank_and_domains_are_rounded(sent: list[Tokens]) -> None:
    """256 + 1 is no bfloat16; 256 + 1 + 1 is."""
    outputs = [torch.tensor([[1.0], [0], [0]]).bfloat16() for _ in range(2)]
    bias = torch.tensor([[256.0], [5], [7]]).bfloat16()
    combined = oracle.combine(sent, 4, 0, outputs, 1, [bias])
    assert combined[:, 0].tolist() == [258, 5, 7]
    weights = [torch.ones(3, 3), torch.full((3, 3), 10.0)]
    returned = oracle.combine_weights(sent, 4, 0, weights, 2)
    assert returned.tolist() == [[11] * 3, [10] * 3, [0] * 3]


def test_low_latency_rows_are_packed_by_source_and_weighed(sent: list[Tokens]) -> None:
    packed = oracle.low_latency_layout(sent, 4, 1)
    assert packed.places == [[(0, 0), (1, 1)], [(0, 1), (1, 1)]]
    assert packed.layout_range == [[1, 1 << 32 | 1], [1, 1 << 32 | 1]]
    outputs = [torch.full((2, 6, 1), value).bfloat16() for value in (1.0, 10.0)]
    combined = oracle.low_latency_combine(sent, 4, 0, outputs)
    assert combined[:, 0].tolist() == [1 * 1 + 2 * 10 + 3 * 1, 4 * 10 + 6 * 10, 0]


def test_a_block_is_scaled_to_the_largest_fp8() -> None:
    x = torch.zeros(1, 128)
    x[0, :4] = torch.tensor([448, -1, 17, 19])  # 17 and 19 lie between 16, 18 and 20
    codes, factors = oracle.cast(x.bfloat16(), round_scale=False)
    values = codes.view(torch.float8_e4m3fn).float()
    assert factors.item() == 1
    assert values[0, :5].tolist() == [448, -1, 16, 20, 0]


def test_a_rounded_scale_is_the_next_power_of_two() -> None:
    x = torch.zeros(1, 512)
    x[0, 0], x[0, 128], x[0, 256] = 448, 449, 1  # bfloat16 makes 448 of 449
    x[0, 384] = 896 * 2.0**-7
    _, factors = oracle.cast(x.bfloat16(), round_scale=True)
    assert factors.tolist() == [[1, 1, 2.0**-8, 2.0**-6]]
    (pack,) = oracle.packed_exponents(factors).flatten().tolist()
    assert pack.to_bytes(4, "little") == bytes([127, 127, 119, 121])


def test_zeros_are_scaled_as_if_they_were_a_ten_thousandth() -> None:
    scale, factor = oracle.scale_of([0.0] * 128, round_scale=False)
    assert scale == pytest.approx(448e4)
    assert factor == pytest.approx(1e-4 / 448)
