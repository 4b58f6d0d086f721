"""Computes the means of a model's keys, which quantized keys are stored without (`LayerSpec.k_mean`).

They are taken once, at start, in one forward pass over a sample of tokens: any will do, as what keys have in common
depends little on the text. The sample is spread over all positions, as RoPE turns keys from one to the next: the mean
over the first positions would make those of later ones larger.
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
STRIDE = 7919  # a prime: how far the ids of tokens that follow each other are apart


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

    Layers whose attention a shift of all scores would change have none.
    """
    layers = model.layer_specs
    if model.state_specs or not any(spec.ignores_shift for spec in layers):
        return layers
    began = time.perf_counter()
    length = min(SAMPLE_TOKENS, max_positions)
    attention = _KeyMeans(layers, length, max_positions, model.device)
    model.forward(torch.arange(length, device=model.device) * STRIDE % model.info.vocab_size, attention)
    means = attention.means
    log.info("means of keys, which quantized ones are stored without: %.1f s", time.perf_counter() - began)
    return [
        spec._replace(k_mean=means[i]) if spec.ignores_shift and means[i].isfinite().all() else spec
        for i, spec in enumerate(layers)
    ]
