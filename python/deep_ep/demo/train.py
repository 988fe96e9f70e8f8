"""The training loop, the same for ranks and for one process."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .model import Exchange, Layer, ModelShape, Replica, Routed, forward
from .text import Text

_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Settings:
    """What both runs share.

    Attributes:
        shape: the model.
        num_ranks: ranks of the distributed run.
        num_steps: training steps.
        num_sequences: sequences of a step, a multiple of num_ranks.
    """

    shape: ModelShape
    num_ranks: int
    num_steps: int
    num_sequences: int

    @property
    def num_tokens(self) -> int:
        """Tokens of one step on all ranks."""
        return self.num_sequences * self.shape.context


@dataclass
class Run:
    """What a run leaves to compare.

    Attributes:
        losses: mean loss of each step.
        seconds: time of each step.
        first_outputs: digest of each shard's output of the first expert layer in the first step.
        weights: digest of the weights after the last step, by part of the model.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first_outputs: list[str] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)

    def tokens_per_second(self, num_tokens: int) -> float:
        """Over all steps but the first, which also warms up."""
        seconds = self.seconds[1:] or self.seconds
        return num_tokens * len(seconds) / sum(seconds)


def train(
    settings: Settings,
    text: Text,
    replicas: Sequence[Replica],
    shard_idx: Sequence[int],
    experts: Sequence[Layer],
    first_expert: int,
    exchange: Exchange,
    gather: Callable[[list[Tensor]], list[Tensor]],
    on_step: Callable[[int, float], None],
) -> Run:
    """Trains and returns what to compare.

    Args:
        settings: shape and length of the run.
        text: to learn from.
        replicas: one a shard of this process.
        shard_idx: which shards of the batch they take.
        experts: the experts of this process by layer.
        first_expert: global index of the first of them.
        exchange: how tokens reach their experts.
        gather: from a vector a shard of this process to the vectors of all shards, in their order.
        on_step: called after each step with its number and its loss.
    """
    run = Run()
    num_shards = len(gather([torch.zeros(1)] * len(replicas)))
    parameters = [p for module in [*replicas, *_experts(experts)] for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, _LEARNING_RATE)

    def recorded(layer: Layer, shards: Sequence[Routed]) -> list[Tensor]:
        outputs = exchange(layer, shards)
        if not run.first_outputs:
            run.first_outputs = [_digest([output]) for output in outputs]
        return outputs

    for step in range(settings.num_steps):
        start = time.perf_counter()
        batch = text.batch(step, settings.num_sequences, settings.shape.context)
        shards = [batch.chunk(num_shards)[idx] for idx in shard_idx]
        losses = forward(replicas, shards, experts, recorded)
        optimizer.zero_grad()
        torch.autograd.backward([loss / num_shards for loss in losses])
        vectors = gather([_pack(*pair) for pair in zip(replicas, losses, strict=True)])
        # Added in the order of the shards, by every rank alike: an all-reduce may choose any order.
        total = vectors[0].clone()
        for vector in vectors[1:]:
            total += vector
        for replica in replicas:
            _unpack_gradients(total, replica)
        optimizer.step()
        run.losses.append(total[-1].item() / num_shards)
        run.seconds.append(time.perf_counter() - start)
        on_step(step, run.losses[-1])

    run.weights = {"replicated part": _digest(replicas[0].parameters())}
    for layer_idx, layer in enumerate(experts):
        for idx, expert in enumerate(layer, first_expert):
            run.weights[f"layer {layer_idx}, expert {idx}"] = _digest(expert.parameters())
    return run


def _experts(experts: Sequence[Layer]) -> list[nn.Module]:
    return [expert for layer in experts for expert in layer]


def _pack(replica: Replica, loss: Tensor) -> Tensor:
    """The gradients of a replica and its loss in one vector."""
    gradients = [p.grad.flatten() for p in replica.parameters() if p.grad is not None]
    return torch.cat([*gradients, loss.detach().reshape(1)])


def _unpack_gradients(vector: Tensor, replica: Replica) -> None:
    start = 0
    for parameter in replica.parameters():
        parameter.grad = vector[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
