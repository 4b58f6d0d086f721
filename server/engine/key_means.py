"""Computes the means of a model's keys, which are subtracted before keys are quantized (`LayerSpec.k_mean`).

They are computed once, at start, in one forward pass over a sample of tokens. Any tokens will do, as what keys have in
common depends little on the text. The sample is spread over all positions, because RoPE rotates keys by their position:
the mean over the first positions does not fit keys at later ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.types import LayerSpec
from server.models.base import Model
from server.models.no_cache import NoCacheAttention

log = logging.getLogger(__name__)

SAMPLE_TOKENS = 64
ID_STEP = 7919  # from the id of a token to that of the next one; a prime, so that ids differ


class _KeyMeans(NoCacheAttention):
    """Attention over a sample of tokens at evenly spread positions that computes the mean of each layer's keys."""

    def __init__(self, specs: Sequence[LayerSpec], length: int, max_positions: int, device: torch.device) -> None:
        super().__init__(specs, length, device)
        self.means: dict[int, Tensor] = {}
        self.positions = self.positions * max_positions // length

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention, and the mean [H, D] of the layer's keys k [N,H,D]."""
        # Rounded, so that it does not depend on the order of sums
        self.means[layer_idx] = k.float().mean(0).bfloat16().float()
        return super().attend(layer_idx, q, k, v)


@torch.inference_mode()
def add_key_means(model: Model, max_positions: int) -> Sequence[LayerSpec]:
    """Return the model's layers with the means of their keys, for texts of up to `max_positions` tokens.

    Layers whose attention changes if a number is added to all scores have none.
    """
    layers = model.layer_specs
    if model.state_specs or not any(spec.ignores_shift for spec in layers):
        return layers
    began = time.perf_counter()
    length = min(SAMPLE_TOKENS, max_positions)
    attention = _KeyMeans(layers, length, max_positions, model.device)
    model.forward(torch.arange(length, device=model.device) * ID_STEP % model.info.vocab_size, attention)
    means = attention.means
    log.info("computed the means of keys, for quantizing, in %.1f s", time.perf_counter() - began)
    return [
        spec._replace(k_mean=means[i]) if spec.ignores_shift and means[i].isfinite().all() else spec
        for i, spec in enumerate(layers)
    ]
