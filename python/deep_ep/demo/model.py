"""A small byte-level language model whose feed-forward layers are mixtures of experts.

The part without experts is replicated: one replica a rank. `forward` takes a list of replicas with
a shard of the batch each, so that one process can compute exactly what N ranks compute. Every
tensor with a gradient has at most two uses, so that no sum of gradients depends on the order in
which autograd runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

_VOCABULARY = 256


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model."""

    num_experts: int
    num_topk: int = 4
    num_layers: int = 2
    num_heads: int = 4
    hidden: int = 128
    expert_hidden: int = 128
    context: int = 64


class Routed(NamedTuple):
    """What a layer asks its experts, for one shard.

    Attributes:
        x: `[num_tokens, hidden]` float32.
        topk_idx: `[num_tokens, num_topk]` int64, the experts of each token, distinct.
        topk_weights: `[num_tokens, num_topk]` float32, their weights.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


class Expert(nn.Module):
    """One feed-forward network, started from a seed of its own so that any rank can build it."""

    def __init__(self, shape: ModelShape, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(
            torch.randn(shape.expert_hidden, shape.hidden, generator=generator) * 0.05
        )
        self.down = nn.Parameter(
            torch.randn(shape.hidden, shape.expert_hidden, generator=generator) * 0.05
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(x @ self.up.T) @ self.down.T


Layer = Sequence[Expert]
# Sends the tokens of all shards to the experts of a layer and returns the sums of their outputs,
# `[num_tokens, hidden]` float32 a shard.
Exchange = Callable[[Layer, Sequence[Routed]], list[Tensor]]


def make_experts(shape: ModelShape, first: int, count: int) -> list[list[Expert]]:
    """Experts `first .. first + count - 1` of every layer."""
    return [
        [Expert(shape, seed=1000 * layer + i) for i in range(first, first + count)]
        for layer in range(shape.num_layers)
    ]


def run_experts(layer: Layer, rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """The weighted outputs of rows that are grouped by expert.

    Args:
        layer: the experts of this process.
        rows: `[num_rows, hidden]`.
        weights: `[num_rows]` float32.
        counts: rows of each expert.

    Returns:
        `[num_rows, hidden]` float32.
    """
    outputs = [expert(x) for expert, x in zip(layer, rows.float().split(counts), strict=True)]
    return torch.cat(outputs) * weights[:, None]


class Block(nn.Module):
    """Attention, and the router of the experts that follow."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.num_heads, self.num_topk = shape.num_heads, shape.num_topk
        self.attention_norm = nn.LayerNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.expert_norm = nn.LayerNorm(shape.hidden)
        self.router = nn.Linear(shape.hidden, shape.num_experts, bias=False)

    def attend(self, h: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(h)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h + self.out(mixed.transpose(1, 2).flatten(-2))

    def route(self, h: Tensor) -> Routed:
        x = self.expert_norm(h).flatten(0, 1)
        scores = self.router(x).softmax(-1)
        topk_weights, topk_idx = scores.topk(self.num_topk, dim=-1)
        return Routed(x, topk_idx, topk_weights)


class Replica(nn.Module):
    """The part of the model that every rank holds."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bytes = nn.Embedding(_VOCABULARY, shape.hidden)
        self.positions = nn.Parameter(torch.randn(shape.context, shape.hidden) * 0.02)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, _VOCABULARY, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.bytes(tokens) + self.positions

    def loss(self, h: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), targets.flatten())


def forward(
    replicas: Sequence[Replica],
    shards: Sequence[Tensor],
    experts: Sequence[Layer],
    exchange: Exchange,
) -> list[Tensor]:
    """The mean loss of each shard.

    Args:
        replicas: the model, once a shard.
        shards: `[num_sequences, context + 1]` int64 each.
        experts: the experts of this process, by layer.
        exchange: how tokens reach their experts.
    """
    hs = [replica.embed(shard[:, :-1]) for replica, shard in zip(replicas, shards, strict=True)]
    for idx, layer in enumerate(experts):
        blocks = [replica.blocks[idx] for replica in replicas]
        hs = [block.attend(h) for block, h in zip(blocks, hs, strict=True)]
        routed = [block.route(h) for block, h in zip(blocks, hs, strict=True)]
        outputs = exchange(layer, routed)
        hs = [h + output.view_as(h) for h, output in zip(hs, outputs, strict=True)]
    return [
        replica.loss(h, shard[:, 1:])
        for replica, h, shard in zip(replicas, hs, shards, strict=True)
    ]
