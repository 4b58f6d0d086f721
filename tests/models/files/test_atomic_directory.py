"""The next writer deletes what a killed writer left, but not the directories of writers that still run."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from server.models.files.atomic_directory import PREFIX, AtomicDirectory

WRITER = """
import sys
from pathlib import Path
from server.models.files.atomic_directory import AtomicDirectory

scratch = AtomicDirectory(Path(sys.argv[1]))
(scratch.path / "part").touch()
print(scratch.path, flush=True)
sys.stdin.read()
"""


@contextmanager
def writing(home: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Another process, and the folder in which it is writing."""
    command = [sys.executable, "-c", WRITER, str(home)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Path(process.stdout.readline().strip()), process
        finally:
            process.kill()


def test_what_a_killed_process_left_is_deleted_and_what_another_one_writes_is_not(tmp_path: Path) -> None:
    with writing(tmp_path) as (left, killed), writing(tmp_path) as (written, _):
        assert (left / "part").is_file(), "the second one did not delete what the first one writes"
        killed.kill()
        killed.wait()
        assert (left / "part").is_file()
        ours = AtomicDirectory(tmp_path)
        assert set(tmp_path.iterdir()) == {written, ours.path}
        assert (written / "part").is_file()
        ours.close()
        assert set(tmp_path.iterdir()) == {written}


def test_what_got_its_name_stays(tmp_path: Path) -> None:
    scratch = AtomicDirectory(tmp_path)
    (scratch.path / "part").touch()
    scratch.path.rename(tmp_path / "whole")
    scratch.close()
    AtomicDirectory(tmp_path).close()
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*")] == [Path("whole"), Path("whole/part")]


def test_folders_of_others_stay_and_do_not_hinder(tmp_path: Path) -> None:
    (tmp_path / "draft-of-mine").mkdir()
    (tmp_path / f"{PREFIX}file").touch()
    os.mkfifo(tmp_path / f"{PREFIX}pipe")
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "draft-of-mine")
    AtomicDirectory(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 4


def test_many_at_once_keep_theirs(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}left").mkdir()
    with ThreadPoolExecutor(8) as pool:
        scratches = list(pool.map(lambda _: AtomicDirectory(tmp_path), range(200)))
    assert set(tmp_path.iterdir()) == {scratch.path for scratch in scratches}
    for scratch in scratches:
        scratch.close()
    assert list(tmp_path.iterdir()) == []


def test_without_locks_nothing_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", none)
    first, second = AtomicDirectory(tmp_path), AtomicDirectory(tmp_path)
    assert set(tmp_path.iterdir()) == {first.path, second.path}
    first.close()
    assert set(tmp_path.iterdir()) == {second.path}
    second.close()
