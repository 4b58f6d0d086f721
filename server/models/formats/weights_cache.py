"""A cache of quantized matrices on disk, so that a model is quantized only once.

A folder has the matrices of one checkpoint in one format, in safetensors files: the blocks of each as NAME.Q4_K (or
another block format).

The folder's name is a hash of the metadata of the checkpoint's files: sizes, inodes, mtimes and ctimes. A checkpoint
that was touched in any way therefore has another folder. A hash of contents would not do: all fine-tunes of a model
have the same headers, many have the same bytes in a sample, and reading all bytes takes as long as quantizing them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kernels.weights.block_formats import FORMATS, BlockTensor
from kernels.weights.quantizers import QUANTIZERS
from server.models.errors import ModelError, first_line
from server.models.files.atomic_directory import AtomicDirectory
from server.models.weights import Safetensors, WeightFormat

log = logging.getLogger(__name__)

VERSION = "4"  # of the cached files: change it when their format or the rounding of weights changes
SHARD = 1 << 28  # bytes of matrices that are collected in memory before they are written to a file
ADVICE = "give --weights-cache another folder, or off"


def get_cache_folder(home: Path, checkpoint: Path, format: WeightFormat) -> Path:
    """Return the folder in `home` for a checkpoint in its present state. Raises ModelError if that is unreadable."""
    words = [VERSION]
    try:
        for file in sorted(checkpoint.iterdir()):
            identifies = file.suffix in (".safetensors", ".gguf") or file.name.endswith((".index.json", "config.json"))
            if identifies and file.is_file():
                status = file.stat()
                words += map(str, (file.name, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns))
    except OSError as error:
        raise ModelError(f"cannot read {checkpoint}: {error.strerror}") from None
    return home / _digest(str(checkpoint.resolve())) / f"{format.name}-{_digest(*words)}"


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


class CachedWeights:
    """The quantized matrices that an earlier start has written to a folder."""

    def __init__(self, folder: Path) -> None:
        """Open a folder of the cache. Raises ModelError if its files cannot be read."""
        self._tensors = Safetensors(folder, torch.float32, torch.device("cpu"))
        self._is_readable = True  # until another server deletes the folder
        log.info("reading quantized weights from %s", folder)

    def get(self, name: str) -> BlockTensor | None:
        """Return a matrix by name; None if there is none, or if the folder cannot be read any more, which is logged."""
        for format in QUANTIZERS:
            if self._is_readable and (blocks := f"{name}.{format}") in self._tensors:
                try:
                    return BlockTensor(self._tensors.read_tensor(blocks), FORMATS[format])
                except ModelError as error:
                    self._is_readable = False
                    log.warning("the cached quantized weights are gone; quantizing the weights again: %s", error)
        return None


def open_cached_weights(folder: Path) -> CachedWeights | None:
    """Return the matrices in a folder of the cache; None if it does not exist. An unreadable one is deleted."""
    try:
        return CachedWeights(folder) if folder.is_dir() else None
    except OSError:  # writing to the folder will fail, too, which is logged
        return None
    except ModelError as error:
        log.warning("the cached quantized weights are damaged; quantizing the weights again: %s", error)
        shutil.rmtree(folder, ignore_errors=True)
        return None


class CachedWeightsWriter:
    """Writes quantized matrices to a folder of the cache, which appears only when it is complete.

    Other processes may write the same folder, and the disk may be full: an error is logged once, and nothing is cached.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scratch: AtomicDirectory | None = None  # where files are written until `publish`; None: none written yet
        self._shards = 0
        self._waiting: dict[str, Tensor] = {}
        self._given_up = False

    def put(self, name: str, weight: BlockTensor) -> None:
        """Add a quantized matrix to the folder."""
        if self._given_up:
            return
        self._waiting[f"{name}.{weight.format.name}"] = weight.blocks.cpu()
        if sum(part.nbytes for part in self._waiting.values()) > SHARD:
            with self._or_give_up():
                self._write()

    def publish(self) -> None:
        """Publish the folder after the last matrix; delete those of earlier states of the checkpoint."""
        if self._given_up or not (self._waiting or self._shards):
            return
        with self._or_give_up():
            self._write()
            assert self._scratch is not None
            self._folder.parent.mkdir(exist_ok=True)
            self._scratch.publish(self._folder)
            for other in self._folder.parent.glob(self._folder.name.split("-")[0] + "-*"):
                if other != self._folder:
                    shutil.rmtree(other, ignore_errors=True)
            log.info("the quantized weights are cached in %s for the next start", self._folder)

    def close(self) -> None:
        """Delete the temporary files of a folder that was not published."""
        if self._scratch is not None:
            self._scratch.close()

    def _write(self) -> None:
        """Write the waiting matrices to the disk."""
        if not self._waiting:
            return
        if self._scratch is None:
            self._scratch = AtomicDirectory(self._folder.parent.parent)
        file = self._scratch.path / f"{self._shards:05}.safetensors"
        save_file(self._waiting, file)
        with file.open("rb") as written:
            os.fsync(written)  # the file is on disk before the folder is published
        self._shards += 1
        self._waiting.clear()

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            self._given_up = True
            self._waiting.clear()
            reason = first_line(error)
            log.warning("cannot cache quantized weights, so the next start quantizes again: %s; %s", reason, ADVICE)
            self.close()
