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

from kernels.weights.block_formats import BlockTensor
from kernels.weights.quantization import QuantizedTensor, quantize_symmetric
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
FALLBACK_FORMAT = WeightFormat(8)  # format of matrices whose number of columns is not a multiple of the group size


@contextmanager
def open_quantized_weights(
    weights: Weights, directory: Path, config: WeightsConfig, device: torch.device, layers: int
) -> Iterator[QuantizedWeights]:
    """Yield the quantized weights of a checkpoint; if the model was loaded without errors, write them to the cache."""
    assert config.format is not None
    folder = config.cache_dir and get_cache_folder(config.cache_dir, directory, config.format)
    cached = open_cached_weights(folder) if folder else None
    writer = CachedWeightsWriter(folder) if folder and cached is None else None
    progress = QuantizationProgress(layers, config.format.bits)
    try:
        yield QuantizedWeights(weights, config.format, config.dtype, device, progress, cached, writer)
        if writer and config.cache_dir and get_cache_folder(config.cache_dir, directory, config.format) == folder:
            writer.publish()
    finally:
        progress.close()
        for each in (cached, writer):
            if each:
                each.close()


class QuantizedWeights:
    """Implements `Weights`: quantizes the matrices of another `Weights` when they are read.

    A matrix that is quantized to the same number of bits in the checkpoint stays as it is, and so does an untied
    embedding. If the length of the rows is not a multiple of the group size, they get 8 bits and one scale each.
    """

    def __init__(
        self,
        weights: Weights,
        format: WeightFormat,
        dtype: torch.dtype,
        device: torch.device,
        progress: QuantizationProgress,
        cached: CachedWeights | None = None,
        cache_writer: CachedWeightsWriter | None = None,
    ) -> None:
        """Wrap the `weights` of a checkpoint; those that are not quantized become `dtype`."""
        self._weights = weights
        self._format = format
        self._dtype, self._device = dtype, device
        self._progress = progress
        self._cached, self._cache_writer = cached, cache_writer

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def describe(self, name: str) -> str:
        return self._weights.describe(name)

    def get(self, name: str, shape: Shape) -> Tensor:
        return self._weights.get(name, shape).to(self._dtype)

    def embedding(self, name: str, shape: Shape) -> Matrix:
        found = self._weights.embedding(name, shape)
        return found.to(self._dtype) if isinstance(found, Tensor) else found

    def matrix(self, name: str, shape: Shape) -> Matrix:
        if self._cached is not None and (cached := self._cached.get(name)) is not None:
            check_shape(f"{name!r} in the cache of quantized weights", cached.shape, shape)
            return cached.to(self._device)
        found = self._weights.matrix(name, shape)
        if not isinstance(found, Tensor):
            if found.bits == self._format.bits:
                return found
            dtype = torch.float16 if isinstance(found, BlockTensor) else found.scale.dtype
            found = dequantize_weight(found).to(dtype)
        self._progress.update(name)
        quantized = self._quantize(name, found)
        if self._cache_writer is not None:
            self._cache_writer.put(name, quantized)
        return quantized

    def _quantize(self, name: str, weight: Tensor) -> QuantizedTensor:
        width, group = weight.shape[1], self._format.group_size
        divided = group is None or width % group == 0
        if not divided:
            self._progress.log_once(
                f"matrices of {width} columns get 8 bits, as {width} is not a multiple of the group size {group}"
            )
        try:
            return quantize_symmetric(weight, *(self._format if divided else FALLBACK_FORMAT))
        except ValueError as error:
            raise ModelError(f"{self._weights.describe(name)}: {error}; give --weights auto") from None


class QuantizationProgress:
    """Shows the progress of quantization: a bar on a terminal, otherwise a log line every LOG_INTERVAL seconds."""

    def __init__(self, layers: int, bits: int) -> None:
        self._layers = layers
        self._what = f"quantizing the weights to {bits} bits"
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
