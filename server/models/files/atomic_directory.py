"""A folder that is written before it gets its name, and that is gone if it never does, even if its writer was killed.

A writer holds a lock on its folder, which the system takes back with the process, however that ends. So a folder that
nobody holds was left behind, and whoever makes the next one deletes it. Where the file system has no locks for folders
(NFS) it stays. Does not know what is written.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

PREFIX = ".kvmux-draft-"  # of folders that are ours to delete
UNLOCKED_PREFIX = ".kvmux-new-"  # of those whose writer has not locked them yet: a moment


class AtomicDirectory:
    """A folder in `home` that gets its name when it is complete."""

    def __init__(self, home: Path) -> None:
        """Make the folder, and delete those that others left behind. Raises OSError."""
        home.mkdir(parents=True, exist_ok=True)
        _delete_abandoned(home)
        new = Path(tempfile.mkdtemp(prefix=UNLOCKED_PREFIX, dir=home))
        lock = _open_directory(new)
        self._held = ExitStack()
        self._held.callback(os.close, lock)
        _try_lock(lock)
        self.path = new.rename(home / new.name.replace(UNLOCKED_PREFIX, PREFIX))

    def publish(self, folder: Path) -> None:
        """Give it that name, if nobody was faster. Raises OSError."""
        try:
            self.path.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise

    def close(self) -> None:
        """Delete the folder if it did not get its name."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._held.close()


def _delete_abandoned(home: Path) -> None:
    for folder in home.glob(f"{PREFIX}*"):
        with suppress(OSError):  # no folder, or it got its name, or was deleted
            lock = _open_directory(folder)
            try:
                if _try_lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _open_directory(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _try_lock(folder: int) -> bool:
    """Return whether the lock was free; False where the file system has no locks for folders."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
