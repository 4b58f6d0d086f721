"""The directory of a running server, with its Unix socket and, for `kvmux health`, the URL where it listens.

A server holds a lock on a file in its directory while it runs; the system releases the lock however the server ends. So
directories that killed servers left behind are recognised and removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX, LOCK_FILE, URL_FILE = "kvmux-", "lock", "url"
MAX_SOCKET_PATH = 103  # maximum bytes of a socket's path; macOS has room for 104, with the closing zero


@contextlib.contextmanager
def runtime_directory(url: str | None) -> Iterator[str]:
    """Make a directory for this user alone, with a path short enough for a Unix socket; remove it after the block.

    `url` is where the server listens; None: `kvmux health` does not look for it.
    """
    parent = _choose_parent()
    remove_leftovers(parent)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent) as directory:
        if url is not None:
            (Path(directory) / URL_FILE).write_text(url)
        with _hold_lock(Path(directory)):
            yield directory


def find_running_urls() -> list[str]:
    """Return the URLs of this user's running servers that use the same directory for temporary files."""
    found = []
    for directory in _list_directories(_choose_parent()):
        with contextlib.suppress(OSError):
            if _is_own(directory) and _is_locked(directory):
                found.append((directory / URL_FILE).read_text())
    return sorted(found)


def _choose_parent() -> Path:
    """Return the directory for temporary files, or /tmp if the path of a socket in it would be too long."""
    parent = Path(tempfile.gettempdir())
    return parent if len(os.fsencode(parent / f"{PREFIX}12345678" / "engine.sock")) <= MAX_SOCKET_PATH else Path("/tmp")


def _list_directories(parent: Path) -> list[Path]:
    """Return the directories in `parent` that are named like those of servers, which may run or not."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        return [Path(e.path) for e in entries if e.name.startswith(PREFIX) and e.is_dir(follow_symlinks=False)]
    return []


def _is_own(directory: Path) -> bool:
    """Return whether a directory belongs to this user. Raises OSError if it is gone."""
    return directory.lstat().st_uid == os.getuid()


def _is_locked(directory: Path) -> bool:
    """Return whether a server holds the lock of a directory. Raises OSError if the directory has no lock file."""
    descriptor = os.open(directory / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def _hold_lock(directory: Path) -> Iterator[None]:
    """Hold the directory's lock. The lock file gets its name once it is locked, so that no server finds it unlocked.

    The directory itself is locked against systemd-tmpfiles, which would remove files that are some days old.
    """
    unnamed = directory / f"{LOCK_FILE}.new"
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with unnamed.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            unnamed.rename(directory / LOCK_FILE)
            yield
    finally:
        os.close(descriptor)


def remove_leftovers(parent: Path) -> None:
    """Remove the directories that killed servers of this user have left behind."""
    for directory in _list_directories(parent):
        with contextlib.suppress(OSError):
            if _is_own(directory):
                _remove_if_unlocked(directory)


def _remove_if_unlocked(directory: Path) -> None:
    """Remove a directory if no server holds its lock. Raises OSError if a server does, or if there is no lock file."""
    descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # If the locked file is no longer there, another server has removed the directory: nothing is left to do.
        if os.path.samestat(os.fstat(descriptor), (directory / LOCK_FILE).lstat()):
            shutil.rmtree(directory)
            log.info("removed %s, left behind by a server that was killed", directory)
    finally:
        os.close(descriptor)
