"""Runs any decoder-only model of transformers, with kvmux's attention in place of the model's own.

The model's code runs unchanged. For attention it calls the step's `Attention`, which stores keys and values under each
sequence's strategy; layers with recurrent states find them in the slots of the engine's store. What the layers are like
is found by a probe (probe.py), which refuses a model that would compute something else than by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kernels.ops import Attention
from server.models.base import ForwardStepMixin
from server.models.errors import ModelError
from server.models.transformers_backend.attention import compute_logits
from server.models.transformers_backend.loading import freeze_longrope, load_transformers_model, read_transformers_info
from server.models.transformers_backend.probe import probe_layers
from server.records import WeightUsage


class TransformersModel(ForwardStepMixin):
    """A model that transformers computes; implements `server.models.base.Model`."""

    impl: Literal["transformers"] = "transformers"

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device, *, positions: int | None = None
    ) -> None:
        """Load the model. `positions`: the length of the longest text, by default max_position_embeddings.

        Raises ModelError if transformers cannot load it, or if its layers cannot be served.
        """
        self.info = read_transformers_info(directory)
        self.dtype = dtype
        self._model = load_transformers_model(directory, dtype, device)
        positions = positions or self.info.max_positions
        try:
            freeze_longrope(self._model, positions)
            self._layers = probe_layers(self._model, self.info, positions, device)
        except ModelError as error:
            raise ModelError(f"{directory}: {error}") from None
        self.layer_specs, self.state_specs = self._layers.attention, self._layers.states

    @property
    def device(self) -> torch.device:
        found: torch.device = self._model.device
        return found

    @property
    def weight_bytes(self) -> int:
        return sum(p.nbytes for p in self._model.parameters())

    @property
    def weight_formats(self) -> Mapping[str, WeightUsage]:
        count = sum(p.numel() for p in self._model.parameters())
        return {str(self.dtype).removeprefix("torch."): WeightUsage(count, self.weight_bytes)}

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        """Compute logits [K, V] float32 of ids [N] int64, for rows `attention.logit_index`."""
        return compute_logits(self._model, self._layers.begin_step(attention), input_ids=ids[None])

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings [N, d] of ids [N] int64."""
        found: Tensor = self._model.get_input_embeddings()(ids)
        return found

    def count_flops(self, num_tokens: int, num_logits: int) -> None:
        """Return None (unknown): only the model's own code has the shapes of its matrix products."""

    def forward_embedded(self, x: Tensor, attention: Attention) -> Tensor:
        """Compute logits [K, V] float32 from embeddings x [N, d], as `forward` does from ids."""
        return compute_logits(self._model, self._layers.begin_step(attention), inputs_embeds=x[None])
