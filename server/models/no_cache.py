"""Generation without a KV cache: the whole text goes through the model for every token. Slow and simple.

Tests compare cached generation with it, benchmarks use it as a baseline, and transformers_backend probes models
with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels.ops import AttentionSlice
from kernels.types import LayerSpec
from server.models.base import Model


class NoCacheAttention:
    """Implements `kernels.ops.Attention` for one text whose tokens are computed in one forward pass; stores nothing."""

    slices: Sequence[AttentionSlice] = ()  # nothing is stored

    def __init__(self, specs: Sequence[LayerSpec] | Mapping[int, LayerSpec], length: int, device: torch.device) -> None:
        self._specs = specs
        self.positions = torch.arange(length, device=device)
        self.logit_index = self.positions[-1:]

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute causal attention, with the layer's window if it has one; all scores [Hq, N, N] are in memory."""
        return attend_causally(self._specs[layer_idx], q, k, v)


def attend_causally(spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from the last n tokens of a text to all S of it: q [n,Hq,D], k [S,H,D], v [S,H,Dv] -> [n,Hq,Dv]."""
    num_queries_per_kv = spec.num_q_heads // spec.num_kv_heads
    k, v = (x.float().repeat_interleave(num_queries_per_kv, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    # A token whose value is not finite gets the score NaN: weight times value is NaN even if the weight is 0
    broken = ~v.isfinite().all(-1)
    scores = scores.masked_fill(broken.T[:, None], torch.nan)
    indices = torch.arange(len(k), device=k.device)
    distance = indices[len(k) - len(q) :, None] - indices
    hidden = distance < 0
    if spec.window is not None:
        hidden |= distance >= spec.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if spec.sink_logits is not None:  # attention sinks: one more column of scores, without a value
        sinks = spec.sink_logits.float().view(-1, 1, 1).expand(-1, len(scores[0]), 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v.masked_fill(broken[..., None], 0.0)).to(q.dtype)


@torch.inference_mode()
def full_context_logits(model: Model, ids: Sequence[int]) -> Tensor:
    """Return the logits [V] of the token after `ids`, computed without a cache."""
    attention = NoCacheAttention(model.layer_specs, len(ids), model.device)
    return model.forward(torch.tensor(ids, device=model.device), attention)[0]


def debug_generate_full_context(model: Model, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the tokens generated greedily after `prompt`; each recomputes the whole text: O(n^2) tokens of work."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(int(full_context_logits(model, ids).argmax()))
    return ids[len(prompt) :]
