"""Gradients through dispatch and combine, against the same layer in one process and differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import exchange as ex
import oracle
import problem as problems
from deep_ep.autograd import combine, dispatch
from exchange import Call
from problem import Problem
from ranks import Rank, run_threads

SHAPES = [
    Problem(num_ranks=2, tokens=(6, 4), hidden=8, num_topk=3, num_experts=4),
    Problem(num_ranks=4, num_domains=2, tokens=(5, 0, 3, 1), hidden=8, routing="masked"),
    Problem(num_ranks=3, tokens=(2, 5, 1), hidden=8, num_experts=6, routing="duplicates"),
]
IDS = ["ranks2", "ranks4x2_masked", "ranks3_duplicates"]
LAYOUTS = [Call(), Call(do_expand=True, alignment=4)]
LAYOUT_IDS = ["compact", "expand_a4"]

# The values are small integers and powers of two: every sum is exact, so gradients are bit-equal
# whatever the order, and a finite difference of a linear function has no error.


def whole(values: Tensor) -> Tensor:
    return (values * 4).round().clamp(-8, 8) + 0.0


def scale_of(expert: Tensor) -> Tensor:
    """An expert multiplies by a power of two, its own."""
    return 2.0 ** (expert % 3)


def inputs_of(problem: Problem, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, ids, weights, and the weight of each output in the loss."""
    tokens = problems.tokens_of(problem)[rank]
    seed = problems.generator(problem.seed, rank, 3)
    weights = torch.randint(1, 5, tokens.topk_idx.shape, generator=seed) / 4
    loss = torch.randint(-2, 3, tokens.x.shape, generator=seed).float()
    return ex.put_all((whole(tokens.x.float()), tokens.topk_idx, weights, loss))


def layer_in_one_process(problem: Problem, rank: int, x: Tensor, weights: Tensor) -> Tensor:
    """The layer without communication: every token visits its experts here."""
    topk_idx = ex.put(problems.tokens_of(problem)[rank].topk_idx)
    lanes = torch.where(topk_idx >= 0, weights * scale_of(topk_idx), 0.0)
    return x * lanes.sum(dim=1, keepdim=True)


def layer(
    buffer: object, rank: Rank, problem: Problem, call: Call, x: Tensor, weights: Tensor
) -> Tensor:
    """The same layer, its experts spread over the ranks."""
    topk_idx = ex.put(problems.tokens_of(problem)[rank.index].topk_idx)
    rows, ids, row_weights, handle = dispatch(
        buffer,
        x.bfloat16(),
        topk_idx,
        weights,
        num_experts=problem.num_experts,
        num_max_tokens_per_rank=problem.max_tokens,
        expert_alignment=call.alignment,
        do_expand=call.do_expand,
        do_zero_padding=call.do_expand,
    )
    first = rank.index * (problem.num_experts // problem.num_ranks)
    if call.do_expand:
        ends = handle.psum_num_recv_tokens_per_expert
        expert = torch.zeros(len(rows), device=rows.device)
        for local in range(len(ends) - 1, -1, -1):
            expert[: oracle.align(int(ends[local]), call.alignment)] = first + local
        factor = row_weights * scale_of(expert)
    else:
        factor = torch.where(ids >= 0, row_weights * scale_of(ids + first), 0.0).sum(dim=1)
    return combine(buffer, (rows.float() * factor[:, None]).bfloat16(), handle).float()


def gradients(output: Tensor, loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((output * loss).sum(), inputs))


@pytest.mark.parametrize("call", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("problem", SHAPES, ids=IDS)
def test_gradients_of_tokens_and_router_weights_are_those_of_one_process(
    run: Any,  # noqa: ANN401
    backend: str,
    problem: Problem,
    call: Call,
) -> None:
    run(problem.num_ranks, compare_gradients, problem, call, num_domains=problem.num_domains)


def compare_gradients(rank: Rank, problem: Problem, call: Call) -> None:
    buffer = ex.make_buffer(rank, problem)
    x, _, weights, loss = inputs_of(problem, rank.index)
    here = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    there = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    output = layer(buffer, rank, problem, call, *here)
    expected = layer_in_one_process(problem, rank.index, *there)
    ex.check_same("output", output.detach() + 0.0, expected.detach() + 0.0, rank.index)
    pairs = zip(gradients(output, loss, *here), gradients(expected, loss, *there), strict=True)
    for name, (actual, wanted) in zip(("x", "weights"), pairs, strict=True):
        # The gradient of x has passed through bfloat16; of these values it loses nothing.
        ex.check_same(f"gradient of {name}", actual + 0.0, wanted + 0.0, rank.index)
    buffer.destroy()


@pytest.mark.parametrize("call", LAYOUTS, ids=LAYOUT_IDS)
def test_gradients_of_router_weights_are_finite_differences(backend: str, call: Call) -> None:
    """C080: the layer is linear in a weight, so a step of 1/2 gives the very gradient."""
    run_threads(2, compare_differences, SHAPES[0], call)


def compare_differences(rank: Rank, problem: Problem, call: Call) -> None:
    buffer = ex.make_buffer(rank, problem)
    x, topk_idx, weights, loss = inputs_of(problem, rank.index)

    def value(moved: Tensor) -> float:
        with torch.no_grad():
            return (layer(buffer, rank, problem, call, x, moved) * loss).sum().item()

    leaf = weights.clone().requires_grad_()
    (gradient,) = gradients(layer(buffer, rank, problem, call, x, leaf), loss, leaf)
    most = max(problem.num_tokens)
    for token in range(most):  # all ranks call equally often, also those that have run out
        for lane in range(problem.num_topk):
            step = torch.zeros_like(weights)
            is_real = token < len(weights)
            if is_real:
                step[token, lane] = 0.5
            difference = value(weights + step) - value(weights - step)
            if is_real:
                assert difference == gradient[token, lane].item(), (rank.index, token, lane)
    assert (gradient[topk_idx < 0] == 0).all()
    buffer.destroy()


@pytest.mark.parametrize("call", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("problem", SHAPES, ids=IDS)
def test_several_layers_run_forward_and_then_backward(
    backend: str, problem: Problem, call: Call
) -> None:
    """N8, X14: the handles of all layers are alive at once, used last to first."""
    run_threads(problem.num_ranks, run_layers, problem, call, num_domains=problem.num_domains)


def run_layers(rank: Rank, problem: Problem, call: Call) -> None:
    buffer = ex.make_buffer(rank, problem)
    x, _, weights, loss = inputs_of(problem, rank.index)

    def run(one_layer: Callable[[Problem, Tensor, Tensor], Tensor]) -> tuple[Tensor, list[Tensor]]:
        leaves = [x.clone().requires_grad_()]
        leaves += [weights.clone().requires_grad_() for _ in range(3)]
        output = leaves[0]
        for number, leaf in enumerate(leaves[1:]):
            output = output + one_layer(problem.rerouted(number), output, leaf) / 16
            output = output.bfloat16().float()
        return output.detach(), gradients(output, loss, *leaves)

    output, actual = run(lambda p, o, w: layer(buffer, rank, p, call, o, w))
    expected, wanted = run(lambda p, o, w: layer_in_one_process(p, rank.index, o, w))
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(
            one, other, rtol=5e-2, atol=5e-2 * (1 + float(other.abs().sum()))
        )
    buffer.destroy()


def test_a_rank_that_receives_nothing_takes_part_in_the_backward_pass(backend: str) -> None:
    """C005, D1: all tokens go to rank 0's expert; rank 1 has an output of no rows."""
    problem = Problem(
        num_ranks=2, tokens=(4, 3), hidden=8, num_topk=1, num_experts=2, routing="hot"
    )
    run_threads(2, compare_gradients, problem, Call())
    run_threads(2, compare_gradients, problem, Call(do_expand=True))


def test_a_bias_gets_the_gradient_of_the_output(backend: str) -> None:
    run_threads(2, differentiate_bias, SHAPES[0])


def differentiate_bias(rank: Rank, problem: Problem) -> None:
    buffer = ex.make_buffer(rank, problem)
    x, topk_idx, weights, loss = inputs_of(problem, rank.index)
    biases = [torch.ones_like(x).bfloat16().requires_grad_() for _ in range(2)]
    rows, _, _, handle = dispatch(
        buffer, x.bfloat16(), topk_idx, weights, num_experts=problem.num_experts
    )
    for count in (1, 2):
        used = biases[:count]
        output = combine(buffer, rows, handle, bias=used[0] if count == 1 else tuple(used))
        for gradient in gradients(output, loss.bfloat16(), *used):
            ex.check_same("gradient of bias", gradient, loss.bfloat16(), rank.index)
    buffer.destroy()


@pytest.mark.parametrize("call", LAYOUTS, ids=LAYOUT_IDS)
def test_a_dispatch_without_cpu_sync_has_the_same_gradients(backend: str, call: Call) -> None:
    run_threads(3, compare_unsynchronised, SHAPES[2].rerouted(5), call)


def compare_unsynchronised(rank: Rank, problem: Problem, call: Call) -> None:
    """A loss on what was received: the gradient of x counts the ranks (or lanes) of each token."""
    problem = Problem(**{**problem.__dict__, "routing": "masked", "num_topk": 2})
    buffer = ex.make_buffer(rank, problem)
    tokens = ex.put_tokens(problems.tokens_of(problem)[rank.index])
    results = []
    for cpu_sync in (True, False):
        x = whole(tokens.x.float()).bfloat16().requires_grad_()
        weights = tokens.topk_weights.clone().requires_grad_()
        rows, _, row_weights, handle = dispatch(
            buffer,
            x,
            tokens.topk_idx,
            weights,
            num_experts=problem.num_experts,
            do_expand=call.do_expand,
            do_cpu_sync=cpu_sync,
        )
        ends = handle.psum_num_recv_tokens_per_expert
        if not call.do_expand:
            ends = handle.psum_num_recv_tokens_per_scaleup_rank
        used = int(ends[-1])
        loss = rows[:used].float().sum() + 3 * row_weights[:used].sum()
        results.append(torch.autograd.grad(loss, [x, weights]))
    for synchronised, not_synchronised in zip(*results, strict=True):
        ex.check_same("gradient", not_synchronised, synchronised, rank.index)
    buffer.destroy()


def test_gradients_are_computed_in_the_threads_of_the_autograd_engine(backend: str) -> None:
    """Section 9: backward of a step may run in another thread than forward."""
    run_threads(2, backward_in_thread, SHAPES[0])


def backward_in_thread(rank: Rank, problem: Problem) -> None:
    import threading

    buffer = ex.make_buffer(rank, problem)
    x, _, weights, loss = inputs_of(problem, rank.index)
    leaf = x.clone().requires_grad_()
    output = layer(buffer, rank, problem, Call(), leaf, weights)
    thread = threading.Thread(target=(output * loss).sum().backward)
    thread.start()
    thread.join(30)
    other = x.clone().requires_grad_()
    expected = layer_in_one_process(problem, rank.index, other, weights)
    (wanted,) = gradients(expected, loss, other)
    ex.check_same("gradient", leaf.grad + 0.0, wanted + 0.0, rank.index)
    buffer.destroy()
