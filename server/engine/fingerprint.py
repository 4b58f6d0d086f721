"""`system_fingerprint` of answers: it differs wherever a request with the same seed may get other tokens.

Of the model's files, the settings that change what is computed, and the versions that compute it; the same in every
start while these are the same. Knows neither requests nor the socket.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from server.engine.build import Engine
from server.engine.info import in_effect, versions

SMALL = 2**24  # bytes of a file whose content counts; of larger ones, which are weights, only size and time of change
NUMERIC = (
    "model_impl",
    "device",
    "dtype",
    "weights",
    "kernels",
    "threads",
    "deterministic",
    "max_step_tokens",
    "strategies",
    "rules",
    "default_strategy",
)  # settings that change the last bits of a logit, or more


def fingerprint(engine: Engine) -> str:
    """Return "fp_" and 16 hexadecimal digits."""
    settings = in_effect(engine)
    about = [versions(), {name: settings[name] for name in NUMERIC}, dict(engine.kernels.by_operation)]
    return f"fp_{digest(about, engine.directory)}"


def digest(about: Any, directory: Path) -> str:
    """Return a digest of what msgspec can encode, and of the files in a model's directory."""
    found = hashlib.sha256(msgspec.json.encode(about, order="deterministic"))
    for file in _files(directory):
        with contextlib.suppress(
            OSError
        ):  # a file that cannot be read is not a part of the model, which has been loaded
            now = file.stat()
            large = now.st_size > SMALL
            content = f"{now.st_size} {now.st_mtime_ns}".encode() if large else file.read_bytes()
            found.update(b"\0%b\0%b" % (file.name.encode(), content))
    return found.hexdigest()[:16]


def _files(directory: Path) -> Iterator[Path]:
    """Yield the files of a model, chat templates among them, in the same order each time."""
    for folder in (directory, directory / "additional_chat_templates"):
        if folder.is_dir():
            yield from sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
