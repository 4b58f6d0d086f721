"""Quantizes the matrices of a model one by one while it is loaded, or takes them from the cache of an earlier start."""

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

from kernels.weights.block_formats import FORMATS, BlockTensor
from kernels.weights.quantizers import quantize_blocks
from kernels.weights.stored import dequantize_weight
from server.models.errors import ModelError
from server.models.formats.weights_cache import (
    CachedWeights,
    CachedWeightsWriter,
    get_cache_folder,
    open_cached_weights,
)
from server.models.weights import Matrix, Shape, WeightFormat, Weights, WeightsConfig, check_shape

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)

LOG_INTERVAL = 10.0  # seconds between two log lines about the progress
# Formats of 32 columns in place of those of 256, for matrices whose rows are not whole blocks; those of llama.cpp
FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
_SENSITIVE = re.compile(r"layers\.(\d+)\..*(v_proj|qkv_proj|down_proj|w2)\.weight")


@contextmanager
def open_quantized_weights(
    weights: Weights, directory: Path, config: WeightsConfig, device: torch.device, layers: int
) -> Iterator[QuantizedWeights]:
    """Yield the quantized weights of a checkpoint; if the model was loaded without errors, write them to the cache."""
    assert config.format is not None
    folder = config.cache_dir and get_cache_folder(config.cache_dir, directory, config.format)
    cached = open_cached_weights(folder) if folder else None
    writer = CachedWeightsWriter(folder) if folder and cached is None else None
    progress = QuantizationProgress(layers, config.format.name)
    try:
        yield QuantizedWeights(weights, config.format, layers, config.dtype, device, progress, cached, writer)
        if writer and config.cache_dir and get_cache_folder(config.cache_dir, directory, config.format) == folder:
            writer.publish()
    finally:
        progress.close()
        if writer:
            writer.close()


def choose_block_format(format: WeightFormat, name: str, width: int, layers: int) -> str | None:
    """Return the block format of a matrix by its name and the number of its columns; None: it is not quantized.

    Sensitive are the embedding, the head, and the projections v and down of the first and the last eighth of the layers
    and of every third one between, as in llama.cpp's Q4_K_M (`use_more_bits`).
    """
    match = _SENSITIVE.search(name)
    layer, eighth = int(match[1]) if match else 0, layers // 8
    more = match and (layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2)
    chosen = format.sensitive if more or "layers." not in name else format.usual
    fitting = (each for each in (chosen, FALLBACKS.get(chosen)) if each and width % FORMATS[each].columns == 0)
    return next(fitting, None)


class QuantizedWeights:
    """Implements `Weights`: quantizes the matrices of another `Weights` when they are read.

    A matrix stays as it is if the checkpoint has it in no more bits, or if its rows are no whole blocks.
    """

    def __init__(
        self,
        weights: Weights,
        format: WeightFormat,
        layers: int,
        dtype: torch.dtype,
        device: torch.device,
        progress: QuantizationProgress,
        cached: CachedWeights | None = None,
        cache_writer: CachedWeightsWriter | None = None,
    ) -> None:
        """Wrap the `weights` of a checkpoint of so many layers; those that are not quantized become `dtype`."""
        self._weights = weights
        self._format, self._layers = format, layers
        self._dtype, self._device = dtype, device
        self._progress = progress
        self._cached, self._cache_writer = cached, cache_writer

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def describe(self, name: str) -> str:
        return self._weights.describe(name)

    def get(self, name: str, shape: Shape) -> Tensor:
        return self._weights.get(name, shape).to(self._dtype)

    def matrix(self, name: str, shape: Shape) -> Matrix:
        if self._cached is not None and (cached := self._cached.get(name)) is not None:
            check_shape(f"{name!r} in the cache of quantized weights", cached.shape, shape)
            return cached.to(self._device)
        found, wanted = (
            self._weights.matrix(name, shape),
            choose_block_format(self._format, name, shape[1], self._layers),
        )
        if wanted is None:
            self._progress.log_once(
                f"matrices of {shape[1]} columns are not quantized: they are not whole blocks of 32"
            )
            return found.to(self._dtype) if isinstance(found, Tensor) else found
        if not isinstance(found, Tensor):
            if found.bits <= FORMATS[wanted].bits:
                return found
            found = dequantize_weight(found)
        self._progress.update(name)
        quantized = self._quantize(name, found, wanted)
        if self._cache_writer is not None:
            self._cache_writer.put(name, quantized)
        return quantized

    embedding = matrix

    def _quantize(self, name: str, weight: Tensor, format: str) -> BlockTensor:
        try:
            return quantize_blocks(weight, format)
        except ValueError as error:
            raise ModelError(f"{self._weights.describe(name)}: {error}; give --weights auto") from None


class QuantizationProgress:
    """Shows the progress of quantization: a bar on a terminal, otherwise a log line every LOG_INTERVAL seconds."""

    def __init__(self, layers: int, format: str) -> None:
        self._layers = layers
        self._what = f"quantizing the weights to {format}"
        self._bar: Progress | None = None
        self._last = time.monotonic()
        self._logged: set[str] = set()

    def update(self, name: str) -> None:
        """Show the layer of the matrix `name`, which is quantized next."""
        match = re.search(r"layers\.(\d+)\.", name)
        layer = int(match[1]) if match else 0
        if sys.stderr.isatty():
            self._bar = self._bar or self._start_bar()
            self._bar.update(self._bar.task_ids[0], completed=layer)
        elif time.monotonic() - self._last > LOG_INTERVAL:
            self._last = time.monotonic()
            log.info("%s: layer %d of %d", self._what, layer + 1, self._layers)

    def log_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            log.info(message)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _start_bar(self) -> Progress:
        from rich.console import Console  # imported here, so that a start without quantization does not need it
        from rich.progress import Progress

        bar = Progress(console=Console(file=sys.stderr), transient=True)
        bar.add_task(self._what, total=self._layers)
        bar.start()
        return bar
