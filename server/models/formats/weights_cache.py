"""Quantized matrices on disk, so that a model is rounded once and read from then on. Knows no layer and no setting.

A folder has those of one checkpoint in one format, in safetensors files: NAME.int4 (or int8) and NAME.scale of each
matrix, all of them symmetric; and a checksum of every tensor, so that bytes that have changed on the disk are never
served. Matrices are read into memory rather than mapped: what was checked is what is used.

The folder is called after what the file system says of the checkpoint's files: sizes, inodes, and when they and what is
known of them changed. So one that was touched in any way is another checkpoint. Headers are the same in every tuned
model, samples of the bytes in many, and to read them all takes as long as to round them.
"""

from __future__ import annotations

import hashlib
import json
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

from kernels.quantization import BITS, QuantizedTensor, from_symmetric
from server.models.config_file import read_json
from server.models.errors import ModelError, first_line
from server.models.files.atomic_directory import AtomicDirectory
from server.models.formats.checksum import checksum
from server.models.weights import Safetensors, WeightFormat

log = logging.getLogger(__name__)

VERSION = "2"  # of what lies in the files, and of how weights are rounded; another one when either changes
SHARD = 1 << 28  # bytes that wait in memory to be written
CHECKSUMS = "checksums.json"  # of every tensor in a folder, by its name
ADVICE = "give --weights-cache another folder, or off"


def get_cache_folder(home: Path, checkpoint: Path, format: WeightFormat) -> Path:
    """Return the folder within `home` for a model's directory as it is now. Raises ModelError."""
    words = [VERSION]
    try:
        for file in sorted(checkpoint.iterdir()):
            identifies = file.suffix in (".safetensors", ".gguf") or file.name.endswith((".index.json", "config.json"))
            if identifies and file.is_file():
                status = file.stat()
                words += map(str, (file.name, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns))
    except OSError as error:
        raise ModelError(f"cannot read {checkpoint}: {error.strerror}") from None
    return home / _digest(str(checkpoint.resolve())) / f"int{format.bits}-{_digest(*words)}"


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


class CachedWeights:
    """The matrices that an earlier start has kept in a folder."""

    def __init__(self, folder: Path) -> None:
        """Find what the folder has. Raises ModelError if it cannot be read."""
        self._folder = folder
        self._tensors = Safetensors(folder, torch.float32, torch.device("cpu"), mapped=False)
        self._checksums = read_json(folder / CHECKSUMS)
        self._damaged = False
        log.info("quantized weights are those in %s", folder)

    def get(self, name: str) -> QuantizedTensor | None:
        """Return a matrix in memory; None if it was not kept, or is damaged, which is logged once."""
        for bits in BITS:
            if (numbers := f"{name}.int{bits}") in self._tensors or numbers in self._checksums:
                try:
                    return from_symmetric(self._read_checked(numbers), self._read_checked(f"{name}.scale"), bits)
                except ModelError as error:
                    self._report_damage(error)
        return None

    def close(self) -> None:
        """Delete the folder if something in it is damaged, so that the next start makes it anew."""
        if self._damaged:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _read_checked(self, name: str) -> Tensor:
        tensor = self._tensors.read_tensor(name)
        if checksum(tensor) != self._checksums.get(name):
            raise ModelError(f"{name} in {self._folder} is not what was written: its checksum is another")
        return tensor

    def _report_damage(self, error: ModelError) -> None:
        if not self._damaged:
            log.warning("quantizing anew what is damaged of the weights that an earlier start kept: %s", error)
        self._damaged = True


def open_cached_weights(folder: Path) -> CachedWeights | None:
    """Return what the folder has kept; None if there is nothing. Log and delete what cannot be read."""
    try:
        return CachedWeights(folder) if folder.is_dir() else None
    except OSError:  # nothing can be kept there either, which the writer logs
        return None
    except ModelError as error:
        log.warning("quantizing the weights anew, as what an earlier start kept of them is damaged: %s", error)
        shutil.rmtree(folder, ignore_errors=True)
        return None


class CachedWeightsWriter:
    """Matrices to keep: published all or not at all, as other processes may do the same, or the disk may be full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scratch: AtomicDirectory | None = None  # where it is until it is whole; None: nothing was written
        self._shards = 0
        self._waiting: dict[str, Tensor] = {}
        self._checksums: dict[str, int] = {}
        self._given_up = False

    def put(self, name: str, weight: QuantizedTensor) -> None:
        """Add a symmetric matrix."""
        if self._given_up:
            return
        self._waiting |= {f"{name}.int{weight.bits}": weight.numbers.cpu(), f"{name}.scale": weight.scale.cpu()}
        if sum(part.nbytes for part in self._waiting.values()) > SHARD:
            with self._or_give_up():
                self._write()

    def publish(self) -> None:
        """Publish the folder after the last matrix; delete those of the checkpoint before it changed."""
        if self._given_up or not (self._waiting or self._shards):
            return
        with self._or_give_up():
            self._write()
            self._write_checksums()
            assert self._scratch is not None
            self._folder.parent.mkdir(exist_ok=True)
            self._scratch.publish(self._folder)
            for other in self._folder.parent.glob(self._folder.name.split("-")[0] + "-*"):
                if other != self._folder:
                    shutil.rmtree(other, ignore_errors=True)
            log.info("the next start finds the quantized weights in %s", self._folder)

    def close(self) -> None:
        """Delete what was not published."""
        if self._scratch is not None:
            self._scratch.close()

    def _write(self) -> None:
        """Write the waiting matrices to the disk."""
        if not self._waiting:
            return
        if self._scratch is None:
            self._scratch = AtomicDirectory(self._folder.parent.parent)
        file = self._scratch.path / f"{self._shards:05}.safetensors"
        self._checksums |= {name: checksum(tensor) for name, tensor in self._waiting.items()}
        save_file(self._waiting, file)
        with file.open("rb") as written:
            os.fsync(written)  # before it gets its name
        self._shards += 1
        self._waiting.clear()

    def _write_checksums(self) -> None:
        assert self._scratch is not None
        with (self._scratch.path / CHECKSUMS).open("w", encoding="utf-8") as file:
            json.dump(self._checksums, file)
            file.flush()
            os.fsync(file)

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            self._given_up = True
            self._waiting.clear()
            why = first_line(error)
            log.warning("the next start has to quantize the weights again, as nothing can be kept: %s; %s", why, ADVICE)
            self.close()
