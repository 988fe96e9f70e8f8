"""The oracle against results worked out by hand: the judge of all other suites must be right."""

from __future__ import annotations

import pytest
import torch

import oracle
from exchange import check_same
from oracle import Exchange, Tokens


def tokens(rows: list[list[int]], first: float) -> Tokens:
    count = len(rows)
    return Tokens(
        x=torch.arange(count, dtype=torch.float32).add(first).to(torch.bfloat16)[:, None],
        topk_idx=torch.tensor(rows, dtype=torch.int64).reshape(count, 3),
        topk_weights=torch.arange(3 * count, dtype=torch.float32).reshape(count, 3) + 100 * first,
    )


@pytest.fixture
def exchange() -> Exchange:
    """2 ranks, experts 0 1 | 2 3; rank 0 has tokens 1 2 3, rank 1 has tokens 8 9."""
    return Exchange(
        tokens=[
            tokens([[0, 2, 1], [3, -1, 3], [-1, -1, -1]], 1),
            tokens([[1, 0, -1], [2, 1, 3]], 8),
        ],
        num_experts=4,
        num_max_tokens_per_rank=5,
    )


def test_compact_rows_come_in_order_of_source_and_token(exchange: Exchange) -> None:
    received = [oracle.dispatch(exchange, rank) for rank in range(2)]
    assert received[0].x[:, 0].tolist() == [1, 8, 9]
    assert received[1].x[:, 0].tolist() == [1, 2, 9]
    assert received[0].topk_idx.tolist() == [[0, -1, 1], [1, 0, -1], [-1, 1, -1]]
    assert received[1].topk_idx.tolist() == [[-1, 0, -1], [1, -1, 1], [0, -1, 1]]
    assert received[1].topk_weights.tolist() == [[100, 101, 102], [103, 104, 105], [803, 804, 805]]
    assert received[0].layout.psum_scaleup == [1, 3]
    assert received[0].layout.psum_expert == [2, 5]
    assert [row[:2] for row in received[1].layout.metadata] == [[0, 1], [1, 2], [6, 5]]


def test_expanded_rows_come_in_order_of_expert_source_token_and_lane(exchange: Exchange) -> None:
    received = oracle.dispatch(exchange, 1, do_expand=True, alignment=4)
    assert received.x[:, 0].tolist() == [1, 9, 0, 0, 2, 2, 9, 0]
    assert received.topk_weights.tolist() == [101, 803, 0, 0, 103, 105, 805, 0]
    assert received.layout.padding == [2, 3, 7]
    assert received.layout.counts == [2, 3]
    assert received.layout.psum_expert == [2, 7]
    assert received.layout.metadata == [[0, 1, -1, 0, -1], [1, 2, 4, -1, 5], [6, 5, 1, -1, 6]]
    assert received.layout.num_expanded == 8


def column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).to(torch.bfloat16)[:, None]


def test_combine_adds_the_bias_first_and_rounds_once(
    exchange: Exchange,
) -> None:
    # Float32 has no 2^25 + 1: a bias added last would survive.
    outputs = [column([-(2.0**25), 0, 7]), column([2.0**25, 3, 5])]
    one = [torch.ones(3, 1, dtype=torch.bfloat16)]
    assert oracle.combine(exchange, 0, outputs, bias=one)[:, 0].tolist() == [0, 4, 1]
    assert oracle.combine(exchange, 0, outputs)[:, 0].tolist() == [0, 3, 0]
    assert oracle.combine(exchange, 1, outputs)[:, 0].tolist() == [0, 12]


def test_combine_of_expanded_rows_rounds_per_rank_only_when_reductions_are_multiple() -> None:
    single = [Tokens(x=column([1.0]), topk_idx=torch.tensor([[0, 1, 2]])), tokens([], 1)]
    exchange = Exchange(tokens=single, num_experts=4, num_max_tokens_per_rank=1)
    outputs = [column([256.0, 1.0]), column([1.0])]  # bfloat16 has no 257
    options = {"do_expand": True}
    twice = oracle.combine(exchange, 0, outputs, multiple_reduction=True, **options)
    once = oracle.combine(exchange, 0, outputs, multiple_reduction=False, **options)
    assert (twice.item(), once.item()) == (256, 258)


def test_combine_over_two_domains_rounds_per_domain() -> None:
    none = tokens([], 1)
    sender = Tokens(x=column([1.0]), topk_idx=torch.tensor([[0, 1, 2]]))
    outputs = [column([256.0]), column([1.0]), column([1.0]), column([])]
    for domains, expected in ((1, 258), (2, 256)):
        exchange = Exchange([sender, none, none, none], 4, 1, num_domains=domains)
        assert oracle.combine(exchange, 0, outputs).item() == expected


def test_weights_come_back_from_the_rank_of_each_lane(exchange: Exchange) -> None:
    compact = [oracle.dispatch(exchange, r).topk_weights for r in range(2)]
    expanded = [oracle.dispatch(exchange, r, do_expand=True).topk_weights for r in range(2)]
    sent = exchange.tokens[0]
    expected = torch.where(sent.topk_idx >= 0, sent.topk_weights, 0.0)
    assert torch.equal(oracle.combine_weights(exchange, 0, compact), expected)
    assert torch.equal(oracle.combine_weights(exchange, 0, expanded, do_expand=True), expected)


def test_the_comparison_names_rank_place_and_both_values() -> None:
    expected = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    wrong = expected.clone()
    wrong[2, 1] += 0.5
    check_same("x", expected.clone(), expected, rank=1)
    with pytest.raises(
        AssertionError, match=r"rank 1: x: 1 elements in 1 of 4 .*\[2, 1\]: 7.5, expected 7.0"
    ):
        check_same("x", wrong, expected, rank=1)
    with pytest.raises(AssertionError, match="shape"):
        check_same("x", wrong[:3], expected, rank=1)
    with pytest.raises(AssertionError, match="-0.0"):
        check_same("x", torch.tensor([-0.0]), torch.tensor([0.0]), rank=0)
