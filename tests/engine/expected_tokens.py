"""The tokens with which the engine must answer a request: computed for it alone, from the whole text, uncached.

A token whose logit is highest by a narrow margin could change with the order of sums. The tests' texts have no such
token: computing one fails and asks for another prompt or seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.sampling import compute_probabilities
from kernels.types import LayerSpec
from server.engine.ipc.messages import SamplingParams
from server.engine.sampling.draw import Draw, Noise, draw_tokens
from server.models.base import Model
from server.models.no_cache import NoCacheAttention, debug_generate_full_context

MIN_MARGIN = 1e-5  # far above the rounding of float32, far below what tells tokens apart


class Windowed(NoCacheAttention):
    """As NoCacheAttention, but a query only attends to its latest `window` tokens and the first `sinks`."""

    def __init__(self, specs: Sequence[LayerSpec], length: int, window: int, sinks: int) -> None:
        super().__init__(specs, length, torch.device("cpu"))
        distance = self.positions[:, None] - self.positions
        self._forgotten = (distance >= window) & (self.positions >= sinks)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention with an explicit mask, one query and one head at a time."""
        spec, n = self._specs[layer_idx], len(self.positions)
        out = torch.empty(n, spec.num_q_heads, spec.v_head_dim)
        distance = self.positions[:, None] - self.positions
        hidden = self._forgotten | (distance < 0)
        if spec.window is not None:
            hidden |= distance >= spec.window
        for head in range(spec.num_q_heads):
            kv = head // (spec.num_q_heads // spec.num_kv_heads)
            scores = (q[:, head] @ k[:, kv].T * spec.scale).masked_fill(hidden, -torch.inf)
            out[:, head] = scores.softmax(-1) @ v[:, kv]
        return out


class Reference:
    """The expected texts of one float32 model; memoizes those it has computed."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._greedy: dict[tuple[int, ...], list[int]] = {}
        self._others: dict[tuple[object, ...], list[int]] = {}

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return what `debug_generate_full_context` generates."""
        known = self._greedy.get(tuple(prompt), [])
        if len(known) < count:
            known = debug_generate_full_context(self.model, prompt, count)
            self._assert_clear([*prompt, *known], len(prompt))
            self._greedy[tuple(prompt)] = known
        return known[:count]

    def sampled(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        """Return the sampler's draws from logits of the whole text."""
        key = (*prompt, sampling)
        if key not in self._others:
            ids = list(prompt)
            for _ in range(sampling.max_tokens):
                logits = self._logits(ids, NoCacheAttention(self.model.layer_specs, len(ids), self.model.device))
                _assert_clear_draw(logits[0], sampling, len(ids))
                ids += draw_tokens(logits, [Draw(sampling, len(ids))])
            self._others[key] = ids[len(prompt) :]
        return self._others[key]

    def windowed(self, prompt: Sequence[int], count: int, *, window: int, sinks: int) -> list[int]:
        """Return the greedy tokens of a model that only attends to its window and the sinks."""
        key = (*prompt, count, (window, sinks))
        if key not in self._others:
            ids = list(prompt)
            for _ in range(count):
                logits = self._logits(ids, Windowed(self.model.layer_specs, len(ids), window, sinks))[0]
                _assert_clear_winner(logits)
                ids.append(int(logits.argmax()))
            self._others[key] = ids[len(prompt) :]
        return self._others[key]

    @torch.inference_mode()
    def _logits(self, ids: Sequence[int], attention: NoCacheAttention) -> Tensor:
        return self.model.forward(torch.tensor(ids), attention)

    def _assert_clear(self, ids: Sequence[int], first: int) -> None:
        """Assert that every token from `first` on has the highest logit by a clear margin."""
        attention = NoCacheAttention(self.model.layer_specs, len(ids), self.model.device)
        attention.logit_index = attention.positions[first - 1 : -1]
        for logits in self._logits(ids, attention):
            _assert_clear_winner(logits)


def _assert_clear_winner(logits: Tensor) -> None:
    best, second = logits.topk(2).values.tolist()
    assert best - second > MIN_MARGIN * abs(best), "a token wins by a hair: choose another prompt"


def _assert_clear_draw(logits: Tensor, sampling: SamplingParams, position: int) -> None:
    edges = compute_probabilities(logits, sampling).double().cumsum(-1)
    distance = (edges / edges[-1] - Noise().draw_uniform(sampling.seed, position)).abs().min()
    assert distance > MIN_MARGIN, "a draw falls by a hair: choose another seed"


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Return random ids without special tokens; prompts of another length or seed have no common prefix."""
    draw = random.Random(1000 * seed + length)
    return [draw.randrange(2, 300) for _ in range(length)]
