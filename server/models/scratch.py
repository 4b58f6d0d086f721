"""A folder that is written before it gets its name, and that is gone if it never does, even if its writer was killed.

A writer holds a lock on its folder, which the system takes back with the process, however that ends. So a folder that
nobody holds was left behind, and whoever makes the next one deletes it. Where the file system has no locks for folders
(NFS) it stays. Knows not what is written.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PREFIX = "draft-"


class Scratch:
    """One such folder, in `home`."""

    def __init__(self, home: Path) -> None:
        """Raises OSError."""
        home.mkdir(parents=True, exist_ok=True)
        self._held = ExitStack()
        with _locked(home):  # else somebody could find the new folder before it is locked
            _delete_abandoned(home)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=home))
            self._held.enter_context(_locked(self.path))

    def close(self) -> None:
        """What did not get another name is deleted."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._held.close()


def _delete_abandoned(home: Path) -> None:
    for folder in home.glob(f"{PREFIX}*"):
        with suppress(OSError), _locked(folder, wait=False) as abandoned:  # OSError: it got its name, or was deleted
            if abandoned:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Whether it is ours meanwhile; if not, somebody else holds it, or the file system has no locks for folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _taken(descriptor, wait)
    finally:
        os.close(descriptor)


def _taken(descriptor: int, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
