"""How programs call `Buffer` (V1): training steps and decode loops in their shape, end to end.

Values are small integers and powers of two, so that every sum is exact and the results must equal
those of the same layer computed at one place. Letters in brackets are the clients of clients.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import legacy_exchange as ex
import legacy_oracle as oracle
import problem as problems
from deep_ep import Buffer, EventHandle, EventOverlap
from exchange import check_same, put
from ranks import Rank, run_threads

NUM_RANKS, NUM_EXPERTS, NUM_TOPK, HIDDEN = 3, 6, 3, 128
NUM_TOKENS = (5, 0, 9)


pytestmark = pytest.mark.usefixtures("short_waits")


class Batch:
    """Tokens of one rank, and the layer they go through: experts multiply with 1, 2 or -1."""

    factors = torch.tensor([1.0, 2.0, -1.0]).repeat(NUM_EXPERTS // 3)

    def __init__(self, rank: int, seed: int = 0) -> None:
        random = problems.generator(seed, rank)
        count = NUM_TOKENS[(rank + seed) % NUM_RANKS]
        self.x = torch.randint(-2, 3, (count, HIDDEN), generator=random).bfloat16()
        scores = torch.rand(count, NUM_EXPERTS, generator=random)
        self.topk_idx = scores.topk(NUM_TOPK).indices
        self.topk_idx[torch.rand(count, NUM_TOPK, generator=random) < 0.2] = -1
        self.probs = torch.randint(1, 3, (count, NUM_TOPK), generator=random) / 2
        self.grad = torch.randint(-1, 2, (count, HIDDEN), generator=random).bfloat16()

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """The output, and the gradients of x and of the probabilities."""
        x, probs = self.x.float().requires_grad_(), self.probs.clone().requires_grad_()
        weights = torch.where(self.topk_idx >= 0, probs * self.factors[self.topk_idx], 0)
        y = weights.sum(dim=1, keepdim=True) * x
        y.backward(self.grad.float())
        return y.detach().bfloat16(), x.grad.bfloat16(), probs.grad


def run_experts(rows: Tensor, topk_idx: Tensor, weights: Tensor, rank: int) -> Tensor:
    """The experts of a rank on received rows: factors, weights, and the sum over its experts."""
    first = rank * NUM_EXPERTS // NUM_RANKS
    factors = put(Batch.factors)[(topk_idx + first).clamp(min=0)]
    scale = torch.where(topk_idx >= 0, weights * factors, 0).sum(dim=1, keepdim=True)
    return (rows.float() * scale).bfloat16()


def previous(is_async: bool) -> dict[str, Any]:
    if not is_async:
        return {}
    event = EventOverlap(EventHandle())
    return {"previous_event": event, "async_finish": True, "allocate_on_comm_stream": True}


def waited(event: EventOverlap, is_async: bool) -> None:
    if is_async:
        event.current_stream_wait()


class FusedDispatch(torch.autograd.Function):
    """Hands the handle on as it is [mg, am], or saves its tensors [xt]."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        buffer: Buffer,
        x: Tensor,
        idx: Tensor,
        probs: Tensor,
        mode: dict[str, bool],
    ) -> tuple:
        options = previous(mode["is_async"])
        per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
            idx, NUM_EXPERTS, **options
        )
        if options:
            options["previous_event"] = event
        recv_x, recv_idx, recv_probs, counts, handle, event = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=probs,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            **options,
        )
        waited(event, mode["is_async"])
        ctx.buffer, ctx.mode = buffer, mode
        if mode["saves"]:
            ctx.save_for_backward(*handle)
        else:
            ctx.handle = handle
        return recv_x, recv_idx, recv_probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, _idx: None, grad_probs: Tensor, *_: None) -> tuple:  # noqa: ANN401
        handle = ctx.saved_tensors if ctx.mode["saves"] else ctx.handle
        grad_x, grad_probs, event = ctx.buffer.combine(
            grad_x.contiguous(),
            handle,
            topk_weights=grad_probs.float(),
            **previous(ctx.mode["is_async"]),
        )
        waited(event, ctx.mode["is_async"])
        return None, grad_x, None, grad_probs, None


class FusedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Buffer, x: Tensor, handle: tuple, mode: dict) -> Tensor:  # noqa: ANN401
        combined, _, event = buffer.combine(x, handle=handle, **previous(mode["is_async"]))
        waited(event, mode["is_async"])
        ctx.buffer, ctx.mode = buffer, mode
        if mode["saves"]:
            ctx.save_for_backward(*handle)
        else:
            ctx.handle = handle
        return combined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # noqa: ANN401
        handle = ctx.saved_tensors if ctx.mode["saves"] else ctx.handle
        grad_x, _, _, _, _, event = ctx.buffer.dispatch(
            grad.contiguous(), handle=handle, **previous(ctx.mode["is_async"])
        )
        waited(event, ctx.mode["is_async"])
        return None, grad_x, None, None


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("saves", [False, True], ids=["mg_am", "xt"])
def test_a_training_step_of_two_layers(
    run: Any,  # noqa: ANN401
    backend: str,
    saves: bool,
    is_async: bool,
) -> None:
    run(NUM_RANKS, train, {"saves": saves, "is_async": is_async})


def train(rank: Rank, mode: dict[str, bool]) -> None:
    """N5, N6, N7, N8, D1, D2: the second layer's forward comes before the first one's backward."""
    buffer = ex.make_buffer(rank)
    batches = [Batch(rank.index, seed) for seed in range(2)]
    inputs, outputs = [], []
    for batch in batches:
        x = put(batch.x).clone().requires_grad_()
        probs = put(batch.probs).clone().requires_grad_()
        recv_x, idx, recv_probs, counts, handle = FusedDispatch.apply(
            buffer, x, put(batch.topk_idx), probs, mode
        )
        assert counts.sum() == (idx >= 0).sum()
        rows = run_experts(recv_x, idx, recv_probs, rank.index)
        outputs.append(FusedCombine.apply(buffer, rows, handle, mode))
        inputs.append((x, probs))
    for batch, output, (x, probs) in reversed(list(zip(batches, outputs, inputs, strict=True))):
        output.backward(put(batch.grad))
        for what, actual, expected in zip(
            ("y", "grad x", "grad probs"),
            (output.detach(), x.grad, probs.grad),
            batch.expected(),
            strict=True,
        ):
            check_same(what, actual + 0, expected + 0, rank.index)  # + 0: no negative zeros
    buffer.destroy()


def test_a_prefill_step_of_fp8_tokens(backend: str) -> None:
    """[vH, s1]: scales with the tokens, an own config, asynchronous dispatch, weights inside."""
    run_threads(NUM_RANKS, prefill)


def prefill(rank: Rank) -> None:
    size = Buffer.get_dispatch_config(NUM_RANKS).get_nvl_buffer_size_hint(HIDDEN * 2, NUM_RANKS)
    buffer = Buffer(group=rank.group, num_nvl_bytes=size, num_rdma_bytes=0, low_latency_mode=False)
    batch = Batch(rank.index)
    per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
        topk_idx=put(batch.topk_idx), num_experts=NUM_EXPERTS, async_finish=False
    )
    (data, scales), idx, weights, counts, handle, event = buffer.dispatch(
        x=(
            put(batch.x).to(torch.float8_e4m3fn),
            put(torch.full((len(batch.x), HIDDEN // 128), 2.0)),
        ),
        handle=None,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=put(batch.topk_idx),
        topk_weights=put(batch.probs),
        expert_alignment=1,
        config=Buffer.get_dispatch_config(NUM_RANKS),
        previous_event=event,
        async_finish=True,
        allocate_on_comm_stream=False,
    )
    if event.event is not None:
        event.current_stream_wait()
    assert sum(counts) == (idx >= 0).sum()
    rows = run_experts(data.float() * scales / 2, idx, weights, rank.index)
    combined, _, event = buffer.combine(
        x=rows,
        handle=handle,
        topk_weights=None,
        config=Buffer.get_combine_config(NUM_RANKS),
        async_finish=True,
        allocate_on_comm_stream=False,
    )
    event.current_stream_wait()
    check_same("y", combined + 0, batch.expected()[0] + 0, rank.index)


def test_weights_of_other_ranks_lanes_are_added_up(backend: str) -> None:
    """[de]: lanes without a local expert get a value too, and come back once for each rank."""
    run_threads(NUM_RANKS, add_up_weights)


def add_up_weights(rank: Rank) -> None:
    buffer = ex.make_buffer(rank)
    batch = Batch(rank.index)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(
        put(batch.topk_idx), NUM_EXPERTS
    )
    recv_x, idx, weights, _, handle, _ = buffer.dispatch(
        put(batch.x),
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=put(batch.topk_idx),
        topk_weights=put(torch.full_like(batch.probs, 1 + rank.index)),
    )
    most = weights.amax(dim=1, keepdim=True).expand_as(weights)
    weights = torch.where(idx == -1, most, weights)
    _, combined, _ = buffer.combine(recv_x, handle, topk_weights=weights)
    ranks = in_rank.sum(dim=1, keepdim=True)
    expected = torch.where(ranks > 0, 1.0 + rank.index, 0).expand_as(combined)
    check_same("weights", combined / ranks.clamp(min=1), expected.contiguous(), rank.index)
    prefix = handle[0][:, rank.index].tolist()
    assert prefix[-1] == len(recv_x)
    buffer.destroy()


# --- decode ---------------------------------------------------------------------------------------

MAX_TOKENS = 12


def local_experts(recv_x: Tensor | tuple[Tensor, Tensor], rank: int) -> Tensor:
    """All rows of the packed layout times the factor of their expert."""
    if isinstance(recv_x, tuple):
        data, scales = recv_x
        blocks = data.float().unflatten(2, (-1, 128)) * scales.unsqueeze(3)
        recv_x = blocks.flatten(2)
    first = rank * NUM_EXPERTS // NUM_RANKS
    factors = put(Batch.factors)[first : first + NUM_EXPERTS // NUM_RANKS]
    return (recv_x.float() * factors.view(-1, 1, 1)).bfloat16()


@pytest.mark.parametrize("use_fp8", [False, True], ids=["bf16", "fp8"])
def test_a_decode_loop_with_hooks(run: Any, backend: str, use_fp8: bool) -> None:  # noqa: ANN401
    """[vL, s1]: two halves of a batch in turn, each sent while the other is computed."""
    run(NUM_RANKS, decode, use_fp8)


def decode(rank: Rank, use_fp8: bool) -> None:
    size = Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, HIDDEN, NUM_RANKS, NUM_EXPERTS)
    buffer = Buffer(
        rank.group,
        num_nvl_bytes=0,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=NUM_EXPERTS // NUM_RANKS,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
    )
    buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, NUM_EXPERTS)

    def send(batch: Batch) -> tuple:
        return buffer.low_latency_dispatch(
            put(batch.x),
            put(batch.topk_idx),
            MAX_TOKENS,
            NUM_EXPERTS,
            use_fp8=use_fp8,
            round_scale=use_fp8,
            use_ue8m0=False,
            async_finish=False,
            return_recv_hook=True,
        )

    def send_back(batch: Batch, recv_x: Tensor, handle: tuple, out: Tensor) -> Any:  # noqa: ANN401
        combined, _, hook = buffer.low_latency_combine(
            local_experts(recv_x, rank.index),
            put(batch.topk_idx),
            put(batch.probs),
            handle,
            async_finish=False,
            zero_copy=False,
            return_recv_hook=True,
            out=out,
        )
        assert combined is out
        return hook

    for step in range(3):
        batches = [Batch(rank.index, 2 * step + half) for half in range(2)]
        outs = [put(torch.empty_like(batch.x)) for batch in batches]
        first = send(batches[0])
        first[4]()
        second = send(batches[1])
        finish_first = send_back(batches[0], first[0], first[2], outs[0])
        second[4]()
        finish_first()
        send_back(batches[1], second[0], second[2], outs[1])()
        for batch, out in zip(batches, outs, strict=True):
            check_same("y", out + 0, batch.expected()[0] + 0, rank.index)


def test_a_program_that_changes_between_prefill_and_decode(backend: str) -> None:
    """[lm, ll, xt] N9: both kinds of calls in one buffer, cleaned in between."""
    run_threads(NUM_RANKS, change_modes)


def change_modes(rank: Rank) -> None:
    buffer = ex.make_buffer(rank, low_latency_mode=True)
    problem = problems.Problem(num_ranks=3, tokens=NUM_TOKENS, num_experts=6, hidden=HIDDEN)
    for seed in range(2):
        handle = ex.check_dispatch(buffer, rank, problem.rerouted(seed))
        ex.check_combine(buffer, rank, problem.rerouted(seed), handle)
        buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, NUM_EXPERTS)
        batch = Batch(rank.index, seed)
        recv_x, count, handle, event, hook = buffer.low_latency_dispatch(
            put(batch.x), put(batch.topk_idx), MAX_TOKENS, NUM_EXPERTS, use_fp8=True
        )
        assert hook is None
        sent = [oracle.Tokens(b.x, b.topk_idx) for b in (Batch(r, seed) for r in range(3))]
        packed = oracle.low_latency_layout(sent, NUM_EXPERTS, rank.index)
        assert count.tolist() == [len(places) for places in packed.places]
        combined, event, _ = buffer.low_latency_combine(
            x=local_experts(recv_x, rank.index),
            topk_idx=put(batch.topk_idx),
            topk_weights=put(batch.probs),
            handle=handle,
            async_finish=True,
        )
        event.current_stream_wait()
        torch.testing.assert_close(combined.cpu(), batch.expected()[0], rtol=0.02, atol=0.02)
    buffer.destroy()
