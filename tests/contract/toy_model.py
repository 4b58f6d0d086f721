"""A small decoder of random weights over `kernels.ops.Attention`, and a driver that runs it in fixed steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cache_strategies.base import KVCache, KVSequence
from cache_strategies.types import Text
from kernels.ops import Attention
from kernels.types import LayerSpec
from plugin_kit.driver.steps import count_until_stop, find_instance
from server.engine.batch import Batch, RowInput

VOCABULARY, WIDTH, POSITIONS = 50, 24, 256


class ToyModel:
    """A decoder with attention and a feed-forward part per layer; position embeddings are added to the tokens'."""

    def __init__(self, layers: Sequence[LayerSpec], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

        self.layers = layers
        self.embedding, self.position = draw(VOCABULARY, WIDTH) * 5, draw(POSITIONS, WIDTH) * 5
        self.qkv = [
            [
                draw(spec.num_q_heads * spec.head_dim, WIDTH) * 3,
                draw(spec.num_kv_heads * spec.head_dim, WIDTH) * 3,
                draw(spec.num_kv_heads * spec.v_head_dim, WIDTH),
            ]
            for spec in layers
        ]
        self.out = [draw(WIDTH, spec.num_q_heads * spec.v_head_dim) for spec in layers]
        self.mix = [draw(WIDTH, WIDTH) for _ in layers]
        self.head = draw(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        """Compute logits [K, vocabulary] for ids [N]."""
        x = self.embedding[ids] + self.position[attention.positions]
        for i, spec in enumerate(self.layers):
            q, k, v = (x @ w.T for w in self.qkv[i])
            attended = attention.attend(
                i,
                q.view(-1, spec.num_q_heads, spec.head_dim),
                k.view(-1, spec.num_kv_heads, spec.head_dim),
                v.view(-1, spec.num_kv_heads, spec.v_head_dim),
            )
            x = x + attended.flatten(1) @ self.out[i].T
            x = x + torch.tanh(x @ self.mix[i].T)
        return x[attention.logit_index] @ self.head.T


@dataclass(eq=False)
class Request:
    """A prompt, its greedy tokens, and the logits from which each token was taken."""

    cache: KVCache
    tokens: list[int]
    sequence: KVSequence
    logits: list[Tensor] = field(default_factory=list)


def open_requests(
    caches: Mapping[str, KVCache], placement: Sequence[str], prompts: Sequence[list[int]]
) -> list[Request]:
    """Open a request for each prompt, under the instance that `placement` names, without prefix-cache hits."""
    requests = []
    for name, prompt in zip(placement, prompts, strict=True):
        sequence = caches[name].open(Text(prompt, max_cached=0))
        assert sequence is not None, "no room"
        requests.append(Request(caches[name], list(prompt), sequence))
    return requests


def run_step(model: ToyModel, requests: Sequence[Request], budget: int) -> None:
    """Run a step: one token of each decoding request, then prompts in order, within the budget."""
    work, rows = [], []
    for request in sorted(requests, key=lambda r: len(r.tokens) - r.sequence.length > 1):
        n = min(count_until_stop(request.sequence, budget), len(request.tokens) - request.sequence.length)
        if n == 0:
            continue
        budget -= n
        assert request.sequence.reserve(n), "no room"
        start = request.sequence.length
        ends = start + n == len(request.tokens)
        work.append(
            RowInput(
                find_instance(request.cache), request.sequence, start, request.tokens[start : start + n], int(ends)
            )
        )
        rows.append(request)
    for instance in {item.instance for item in work}:
        instance.poll()
    batch = Batch(work)
    logits = iter(model.forward(batch.input_ids, batch))
    for i in batch.row_order:
        if work[i].num_logits:
            rows[i].logits.append(next(logits))
    batch.commit()
    for i in batch.row_order:
        if work[i].num_logits:
            rows[i].tokens.append(int(rows[i].logits[-1].argmax()))


def generate(model: ToyModel, requests: Sequence[Request], new_tokens: int, budget: int) -> list[Tensor]:
    """Run steps until every request has its tokens; return the logits of each [new_tokens, vocabulary]."""
    while unfinished := [r for r in requests if len(r.logits) < new_tokens]:
        run_step(model, unfinished, budget)
    return [torch.stack(r.logits) for r in requests]
