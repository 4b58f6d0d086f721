"""Quantised matrices on disk, so that a model is rounded once and mapped from then on. Knows no layer and no setting.

A folder has those of one checkpoint in one format, in safetensors files: NAME.int4 (or int8) and NAME.scale of each
matrix, all of them symmetric. It is called after what the file system says of the checkpoint's files: sizes, inodes,
and when they and what is known of them changed. So one that was touched in any way is another checkpoint. Headers are
the same in every fine-tuned model, samples of the bytes in many, and to read them all takes as long as to round them.
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

from kernels.quantised import BITS, Quantised, symmetric
from server.models.errors import ModelError, first_line
from server.models.scratch import Scratch
from server.models.weights import Format, Safetensors

log = logging.getLogger(__name__)

VERSION = "1"  # of what lies in the files, and of how weights are rounded; another one when either changes
SHARD = 1 << 28  # bytes that wait in memory to be written
ADVICE = "give --weights-cache another folder, or off"


def folder_of(home: Path, checkpoint: Path, format: Format) -> Path:
    """Within `home`, that of a model's directory, as it is now."""
    words = [VERSION]
    for file in sorted(checkpoint.iterdir()):
        weighs = file.suffix in (".safetensors", ".gguf") or file.name.endswith((".index.json", "config.json"))
        if weighs and file.is_file():
            now = file.stat()
            words += map(str, (file.name, now.st_size, now.st_ino, now.st_mtime_ns, now.st_ctime_ns))
    return home / _digest(str(checkpoint.resolve())) / f"int{format.bits}-{_digest(*words)}"


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


class Found:
    """What an earlier start has left in a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError if it cannot be read."""
        self._tensors = Safetensors(folder, torch.float32, torch.device("cpu"))
        log.info("quantised weights are those in %s", folder)

    def get(self, name: str) -> Quantised | None:
        """A matrix, mapped; None: it was not quantised. Raises ModelError."""
        for bits in BITS:
            if (numbers := f"{name}.int{bits}") in self._tensors:
                return symmetric(self._tensors.stored(numbers), self._tensors.stored(f"{name}.scale"), bits)
        return None


def found(folder: Path) -> Found | None:
    """None: there is nothing. What cannot be read is told, and deleted."""
    if not folder.is_dir():
        return None
    try:
        return Found(folder)
    except ModelError as error:
        log.warning("quantising the weights anew, as what an earlier start kept of them is damaged: %s", error)
        shutil.rmtree(folder, ignore_errors=True)
        return None


class Draft:
    """What this start leaves: all or nothing, as others may write or read the same, or the disk may be full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scratch: Scratch | None = None  # where it is until it is whole; None: nothing was written
        self._shards = 0
        self._waiting: dict[str, Tensor] = {}
        self._given_up = False

    def put(self, name: str, weight: Quantised) -> None:
        """A symmetric matrix."""
        if self._given_up:
            return
        self._waiting |= {f"{name}.int{weight.bits}": weight.numbers.cpu(), f"{name}.scale": weight.scale.cpu()}
        if sum(part.nbytes for part in self._waiting.values()) > SHARD:
            with self._or_give_up():
                self._write()

    def publish(self) -> None:
        """All that there is has been put. What was kept of the checkpoint before it changed goes."""
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
            log.info("the next start finds the quantised weights in %s", self._folder)

    def close(self) -> None:
        """What was not published is deleted."""
        if self._scratch is not None:
            self._scratch.close()

    def _write(self) -> None:
        """What waits, onto the disk."""
        if not self._waiting:
            return
        if self._scratch is None:
            self._scratch = Scratch(self._folder.parent.parent)
        file = self._scratch.path / f"{self._shards:05}.safetensors"
        save_file(self._waiting, file)
        with file.open("rb") as written:
            os.fsync(written)  # before it gets its name
        self._shards += 1
        self._waiting.clear()

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            self._given_up = True
            self._waiting.clear()
            told = first_line(error)
            log.warning(
                "the next start has to quantise the weights again, as nothing can be kept: %s; %s", told, ADVICE
            )
            self.close()
