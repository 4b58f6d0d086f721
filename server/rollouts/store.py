"""Keeps the state of roll-outs in a JSON file, so that they go on where they were after a restart.

The file is written under another name, flushed to the disk and renamed, so that it is always complete. One server at a
time uses it: it holds a lock, which the system releases however the server ends. Knows neither stages nor statistics.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from server.rollouts.statistics import SavedSamples

log = logging.getLogger(__name__)

VERSION = 2

RolloutState = Literal["shadow", "canary", "complete", "rolled_back", "aborted"]


class RolloutChange(msgspec.Struct, frozen=True):
    """An entry of a roll-out's history."""

    time: float  # seconds since 1970
    before: str
    after: str
    reason: str
    by: str | None  # the operator; None: the server did it


class SavedRollout(msgspec.Struct, frozen=True):
    """Everything about a roll-out that outlives the engine."""

    name: str
    settings: dict[str, Any]
    declared: dict[str, Any] | None  # what the server's settings declared under this name; None: nothing
    instances: dict[str, Any]  # the settings of both instances
    state: RolloutState
    stage: int
    paused: bool
    reason: str
    since: float  # seconds since 1970 of the last change of the state or stage
    elapsed: float  # seconds of the stage in which a server ran
    history: list[RolloutChange]
    fidelity: SavedSamples
    baseline: SavedSamples
    canary: SavedSamples


class SavedRollouts(msgspec.Struct, frozen=True):
    """The contents of the file."""

    version: int
    rollouts: list[SavedRollout]


class DamagedFileError(Exception):
    """A file that exists and cannot be read; the message says why."""


class FileInUseError(Exception):
    """Another server has the file open; the message says so."""


class RolloutStore:
    """The file with the state of roll-outs. Without a path, or while it is not open, nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.has_failed = False  # whether the last attempt to write failed, which is logged once
        self._is_open = False
        self._lock_descriptor: int | None = None

    def open(self) -> list[SavedRollout]:
        """Return what the file contains, and begin to write to it.

        Raises DamagedFileError if it cannot be read, and FileInUseError if another server uses it.
        """
        if self.path is None:
            return []
        self._take_lock(self.path.with_name(self.path.name + ".lock"))
        self._is_open = True
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DamagedFileError(str(error.strerror)) from None
        try:
            saved = msgspec.json.decode(data, type=SavedRollouts)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedFileError(str(error)) from None
        if saved.version != VERSION:
            raise DamagedFileError(f"it is of version {saved.version}, and this server writes version {VERSION}")
        return saved.rollouts

    def _take_lock(self, file: Path) -> None:
        """Lock the file. Raises FileInUseError if another server has locked it."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._lock_descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise FileInUseError(
                "another server keeps its roll-outs in it, so those of this server are not kept for the next start: "
                "set rollouts_file to another file"
            ) from None
        except OSError:
            pass  # the folder cannot be written, which is logged with the first attempt, or there are no locks here

    def set_aside(self) -> Path | None:
        """Rename a damaged file, so that it can be looked at; return its new path, or None if that fails."""
        assert self.path is not None
        aside = self.path.with_name(self.path.name + ".damaged")
        try:
            self.path.replace(aside)
        except OSError:
            return None
        return aside

    def write(self, rollouts: Sequence[SavedRollout]) -> None:
        """Write the state and wait for the disk. If that fails, `has_failed` says that it has to be written again."""
        if not self._is_open:
            return
        assert self.path is not None
        try:
            _replace(self.path, msgspec.json.encode(SavedRollouts(VERSION, list(rollouts))))
        except OSError as error:
            if not self.has_failed:
                log.error(
                    "cannot write the state of roll-outs to %s (%s): after a restart they would be where they are "
                    "in that file; make room or set rollouts_file; this is tried again",
                    self.path,
                    error.strerror,
                )
            self.has_failed = True
        else:
            self.has_failed = False

    def close(self) -> None:
        """Release the file; nothing is written any more."""
        self._is_open = self.has_failed = False
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None


def _replace(path: Path, data: bytes) -> None:
    """Replace the contents of a file, so that it has the old or the new contents whenever the machine stops."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some file systems cannot flush a directory
            os.fsync(folder)
    finally:
        os.close(folder)
