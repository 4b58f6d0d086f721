"""Quantizes the matrices of a model while it is read, one after the other. Knows neither files nor layers."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.quantization import QuantizedTensor, dequantize, quantize_symmetric
from server.models.errors import ModelError
from server.models.formats.weights_cache import CachedWeights, CachedWeightsWriter, folder_of, found
from server.models.weights import Format, Kept, Matrix, Shape, Weights, check_shape

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)

QUIET = 10.0  # seconds between two lines of the log
WHOLE_ROWS = Format(8)  # of rows that the groups do not divide


@contextmanager
def quantized(
    weights: Weights, directory: Path, kept: Kept, device: torch.device, layers: int
) -> Iterator[QuantizedWeights]:
    """Yield the quantized weights of a checkpoint while a model is loaded, and keep them if that succeeds."""
    assert kept.format is not None
    folder = kept.cache and folder_of(kept.cache, directory, kept.format)
    stored = found(folder) if folder else None
    draft = CachedWeightsWriter(folder) if folder and stored is None else None
    telling = Telling(layers, kept.format.bits)
    try:
        yield QuantizedWeights(weights, kept.format, kept.dtype, device, telling, stored, draft)
        if draft and kept.cache and folder_of(kept.cache, directory, kept.format) == folder:
            draft.publish()
    finally:
        telling.end()
        for each in (stored, draft):
            if each:
                each.close()


class QuantizedWeights:
    """Implements `Weights`: those of another, matrices in fewer bits.

    A matrix that has as many bits in the checkpoint stays as it is, and so does an embedding that nothing is multiplied
    with. Rows that the format's groups do not divide are kept in 8 bits, a group each.
    """

    def __init__(
        self,
        weights: Weights,
        format: Format,
        dtype: torch.dtype,
        device: torch.device,
        telling: Telling,
        stored: CachedWeights | None = None,
        draft: CachedWeightsWriter | None = None,
    ) -> None:
        """Quantize `weights` as they are read from a checkpoint; those that are not quantized become `dtype`."""
        self._weights = weights
        self._format = format
        self._dtype, self._device = dtype, device
        self._telling = telling
        self._stored, self._draft = stored, draft

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def what(self, name: str) -> str:
        return self._weights.what(name)

    def get(self, name: str, shape: Shape) -> Tensor:
        return self._weights.get(name, shape).to(self._dtype)

    def embedding(self, name: str, shape: Shape) -> Matrix:
        found = self._weights.embedding(name, shape)
        return found if isinstance(found, QuantizedTensor) else found.to(self._dtype)

    def matrix(self, name: str, shape: Shape) -> Matrix:
        if self._stored is not None and (earlier := self._stored.get(name)) is not None:
            check_shape(f"what an earlier start kept of {name!r}", earlier.shape, shape)
            return earlier.to(self._device)
        found = self._weights.matrix(name, shape)
        if isinstance(found, QuantizedTensor):
            if found.bits == self._format.bits:
                return found
            found = dequantize(found).to(found.scale.dtype)
        self._telling.at(name)
        rounded = self._rounded(name, found)
        if self._draft is not None:
            self._draft.put(name, rounded)
        return rounded

    def _rounded(self, name: str, weight: Tensor) -> QuantizedTensor:
        width, group = weight.shape[1], self._format.group
        divided = group is None or width % group == 0
        if not divided:
            self._telling.once(f"rows of {width} columns are kept in 8 bits, as groups of {group} do not divide them")
        try:
            return quantize_symmetric(weight, *(self._format if divided else WHOLE_ROWS))
        except ValueError as error:
            raise ModelError(f"{self._weights.what(name)}: {error}; give --weights auto") from None


class Telling:
    """How far the quantization is: a bar on a terminal, otherwise a line of the log now and then."""

    def __init__(self, layers: int, bits: int) -> None:
        self._layers = layers
        self._what = f"quantizing the weights to {bits} bits"
        self._bar: Progress | None = None
        self._last = time.monotonic()
        self._told: set[str] = set()

    def at(self, name: str) -> None:
        """Show that a matrix is about to be quantized."""
        match = re.search(r"layers\.(\d+)\.", name)
        layer = int(match[1]) if match else 0
        if sys.stderr.isatty():
            self._bar = self._bar or self._started()
            self._bar.update(self._bar.task_ids[0], completed=layer)
        elif time.monotonic() - self._last > QUIET:
            self._last = time.monotonic()
            log.info("%s: layer %d of %d", self._what, layer + 1, self._layers)

    def once(self, words: str) -> None:
        if words not in self._told:
            self._told.add(words)
            log.info(words)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _started(self) -> Progress:
        from rich.console import Console  # here, as other models start sooner without it
        from rich.progress import Progress

        bar = Progress(console=Console(file=sys.stderr), transient=True)
        bar.add_task(self._what, total=self._layers)
        bar.start()
        return bar
