"""Files of a model that change while it is served: replaced ones do no harm; truncated ones end the engine."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from server.models.files.directory import EMBEDDED
from server.processes import read_ahead
from server.processes.read_ahead import READ_AHEAD_BYTES
from tests.end_to_end.server_process import Server, eventually, serving

QUESTION = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The weights in a copy of the embedded model."""
    shutil.copytree(EMBEDDED["tiny"], tmp_path / "mine")
    return tmp_path / "mine" / "model.safetensors"


def replace(file: Path, data: bytes) -> None:
    """Write a new file and rename it over the old one."""
    new = file.with_name("new")
    new.write_bytes(data)
    new.replace(file)


def text(server: Server) -> str:
    answer = server.complete(**QUESTION, skip_reading_prefix_cache=True)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_a_file_may_be_replaced_while_it_is_served_and_not_truncated(weights: Path) -> None:
    whole = weights.read_bytes()
    size = len(whole)
    # In the dtype of the file: a CPU that is slow in it converts all weights, and reads the file no more.
    with serving("--model", str(weights.parent), "--threads", "1", "--dtype", "bfloat16") as server:

        def logged(words: str) -> None:
            eventually(lambda: words in server.output.read_text())

        expected = text(server)
        replace(weights, bytes(size))
        weights.unlink()
        assert text(server) == expected, "the old file is still mapped"

        replace(weights, whole)
        os.kill(server.engine.pid, signal.SIGKILL)
        logged("ready again")
        os.truncate(weights, 100_000)
        eventually(lambda: server.complete(**QUESTION).status_code == 503)
        logged("SIGBUS means that a model's file could not be read")
        logged(f"the engine cannot restart: cannot read {weights}: it is cut off; fetch it again")

        replace(weights, whole)
        eventually(lambda: server.get("/ready").status_code == 200)
        assert text(server) == expected
        assert "Traceback" not in server.output.read_text()


# ---------------------------------------------------------------- reading ahead
SIZE = 8 * READ_AHEAD_BYTES + 5
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the system which pages of a file it has in memory")


def in_memory(file: Path) -> int:
    """Pages of a file that the system has in memory."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), pages)
        del start
        assert not failed, os.strerror(ctypes.get_errno())
        return sum(page & 1 for page in pages)


@pytest.fixture
def forgotten(tmp_path: Path) -> Path:
    """A file of weights on the disk alone."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(SIZE))
    with file.open("rb") as opened:
        os.fsync(opened)
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_memory(file) > 1:
        pytest.skip("this file system keeps its files in memory")
    return file


@linux
def test_files_are_read_ahead_of_the_engine(forgotten: Path) -> None:
    read_ahead.read_ahead(forgotten.parent)
    eventually(lambda: in_memory(forgotten) == -(-SIZE // mmap.PAGESIZE))


@linux
def test_files_that_are_large_for_the_memory_are_not(forgotten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead.psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * SIZE - 1))
    read_ahead.read_ahead(forgotten.parent)
    assert in_memory(forgotten) <= 1


def test_files_that_are_gone_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    read_ahead.read_ahead(tmp_path)
    read_ahead.read_ahead(tmp_path / "none")
