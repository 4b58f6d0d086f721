"""A model whose logits also depend on layers with recurrent states: any model, with the toy's states beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ops import Attention
from server.engine import build
from tests.contract import toy_states

NUM_BIASES = 64


class StatefulModel:
    """A model of which each row of logits gets a random bias that the states of its whole text choose."""

    state_specs = toy_states.LAYERS

    def __init__(self, model: Any) -> None:
        self._model = model
        generator = torch.Generator().manual_seed(0)
        self._biases = torch.randn(NUM_BIASES, model.info.vocab_size, generator=generator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        """Compute logits [K, V]; without slices, as if the ids were one text that nothing was kept of."""
        logits: Tensor = self._model.forward(ids, attention)
        tokens = ids.tolist()
        numbers = self._run(tokens, attention) if attention.slices else _run_uncached(tokens)
        chosen = torch.tensor(numbers)[attention.logit_index] % NUM_BIASES
        return logits + logits.square().mean(dim=1, keepdim=True).sqrt() * self._biases[chosen]

    @staticmethod
    def _run(tokens: Sequence[int], attention: Attention) -> list[int]:
        numbers: list[int] = []
        for each in attention.slices:
            if each.states is None:  # a step that tries the model, of no text
                numbers += [0] * len(tokens[each.tokens])
                continue
            rows = toy_states.run(each.states, torch.tensor(tokens[each.tokens]))
            numbers += [int(number) for _, *after in rows for number, *_ in after]
        return numbers


def _run_uncached(tokens: Sequence[int]) -> list[int]:
    return [int(toy_states.expect(tokens[:end])[0]) for end in range(1, len(tokens) + 1)]


@contextmanager
def loaded_with_states() -> Iterator[None]:
    """Let engines that are built meanwhile have a StatefulModel of the model that they load."""
    load = build.load_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_model", lambda *args, **kwargs: StatefulModel(load(*args, **kwargs)))
        yield
