"""Quantises the matrices of a model while it is read, one after the other. Knows neither files nor layers."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from kernels.quantised import Quantised, dequantise, quantise_symmetric
from server.models.errors import ModelError
from server.models.weights import Format, Matrix, Weights

log = logging.getLogger(__name__)

QUIET = 10.0  # seconds between two lines of the log


class QuantisedWeights:
    """Implements `Weights`: those of another, matrices in fewer bits.

    Embeddings stay as they are, and with them the lm_head of a model that has none of its own. A matrix that has as
    many bits in the checkpoint stays as it is, too.
    """

    def __init__(self, weights: Weights, format: Format, dtype: torch.dtype) -> None:
        """`weights` come as the checkpoint has them; what is not quantised becomes `dtype`."""
        self._weights = weights
        self._format = format
        self._dtype = dtype
        self._told = time.monotonic()

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def get(self, name: str) -> Tensor:
        return self._weights.get(name).to(self._dtype)

    def embedding(self, name: str) -> Matrix:
        found = self._weights.embedding(name)
        return found if isinstance(found, Quantised) else found.to(self._dtype)

    def matrix(self, name: str) -> Matrix:
        found = self._weights.matrix(name)
        if isinstance(found, Quantised):
            if found.bits == self._format.bits:
                return found
            found = dequantise(found).to(found.scale.dtype)
        if time.monotonic() - self._told > QUIET:
            self._told = time.monotonic()
            log.info("quantising the weights to %d bits: at %s", self._format.bits, name)
        try:
            return quantise_symmetric(found, *self._format)
        except ValueError as error:
            raise ModelError(f"{name}: {error}; give --weights auto") from None
