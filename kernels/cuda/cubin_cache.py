"""Keeps compiled kernels in the user's cache folder: NVRTC takes seconds for each source. Any file may be deleted."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def get_cubin(key: tuple[str, ...], compile_cubin: Callable[[], bytes]) -> bytes:
    """Return the machine code that is kept under a key; compile and keep it if there is none.

    `key`: everything that the machine code depends on. If the folder cannot be written to, nothing is kept.
    """
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
    path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvmux" / "cuda" / f"{digest}.cubin"
    with suppress(OSError):
        return path.read_bytes()
    cubin = compile_cubin()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(cubin)
        os.replace(file.name, path)  # so that no process reads a part of it
    return cubin
