"""Directories that are written under a temporary name and renamed when complete, so that no process sees a partial one.

A writer holds a lock on its temporary directory, which the system releases when the process ends, however that happens.
A directory without a lock was therefore abandoned, and the next writer deletes it. On file systems that cannot lock
directories (NFS) abandoned directories stay.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

PREFIX = ".kvmux-draft-"  # prefix of temporary directories, which are deleted if they are not locked
UNLOCKED_PREFIX = ".kvmux-new-"  # prefix of directories that were just created and are not locked yet


class AtomicDirectory:
    """A temporary directory (`path`) in `home`, which `publish` renames when it is complete."""

    def __init__(self, home: Path) -> None:
        """Make the temporary directory, and delete abandoned ones. Raises OSError if it cannot be made."""
        home.mkdir(parents=True, exist_ok=True)
        _delete_abandoned(home)
        new = Path(tempfile.mkdtemp(prefix=UNLOCKED_PREFIX, dir=home))
        lock = _open_directory(new)
        self._held = ExitStack()
        self._held.callback(os.close, lock)
        _try_lock(lock)
        self.path = new.rename(home / new.name.replace(UNLOCKED_PREFIX, PREFIX))

    def publish(self, folder: Path) -> None:
        """Rename the directory to `folder`, unless another process has made `folder` meanwhile.

        Raises OSError if the system refuses.
        """
        try:
            self.path.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise

    def close(self) -> None:
        """Delete the directory if it was not published."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._held.close()


def _delete_abandoned(home: Path) -> None:
    for folder in home.glob(f"{PREFIX}*"):
        with suppress(OSError):  # skip what is a file, or was renamed or deleted meanwhile
            lock = _open_directory(folder)
            try:
                if _try_lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _open_directory(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _try_lock(folder: int) -> bool:
    """Lock a directory and return whether that succeeded; never on file systems without locks for directories."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
