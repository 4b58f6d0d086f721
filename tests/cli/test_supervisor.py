"""The supervisor with fake children: real processes, real signals. Waits for output, never for time."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

import pytest

from server.engine import supervisor
from server.engine.supervisor import Child, Timing, in_words, private_directory

pytestmark = pytest.mark.timeout(60)


class Server:
    """A supervisor running in a process of its own, and what it and its children print."""

    def __init__(self, directory: Path, engine: str, worker: str, workers: int, grace: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.fakes", engine, worker, str(workers), str(grace)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"TMPDIR": str(directory)},
        )
        assert self.process.stdout is not None
        self.output: IO[str] = self.process.stdout
        self.seen: list[str] = []

    def read_until(self, *patterns: str) -> list[re.Match[str]]:
        """Reads until every pattern was met once, each by a line of its own, in whatever order."""
        found: list[re.Match[str] | None] = [None] * len(patterns)
        while None in found:
            line = self.output.readline()
            assert line, f"ended without one of {patterns}:\n{''.join(self.seen)}"
            self.seen.append(line)
            matches = [None if old else re.search(pattern, line) for old, pattern in zip(found, patterns, strict=True)]
            first = next((i for i, match in enumerate(matches) if match), None)
            if first is not None:
                found[first] = matches[first]
        return [match for match in found if match]

    def pids(self, workers: int = 1) -> list[int]:
        """Of the engine and the workers, once all run and the server is announced."""
        _, *running = self.read_until("announced", r"engine (\d+) runs", *[r"worker (\d+) runs"] * workers)
        return [int(match[1]) for match in running]

    def rest(self) -> str:
        """What is printed until the last process that could print is gone."""
        return self.output.read()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


class Start(Protocol):
    """Starts a server; it is gone at the end of the test."""

    def __call__(
        self, engine: str = "engine", worker: str = "worker", *, workers: int = 1, grace: float = 30.0
    ) -> Server: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def start(engine: str = "engine", worker: str = "worker", *, workers: int = 1, grace: float = 30.0) -> Server:
        servers.append(Server(tmp_path, engine, worker, workers, grace))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()
        server.output.close()


def test_announces_and_stops_workers_before_the_engine(start: Start) -> None:
    server = start(workers=2)
    server.pids(workers=2)
    printed = "".join(server.seen)
    assert re.search(r"serves tiny on http://127\.0\.0\.1:\d+\n", printed)
    assert "float32 on cpu" in printed
    assert "512 MiB" in printed
    assert re.search(r"paged +131,072 tokens  default, block_size=16\n", printed)
    assert re.search(r"short +99,000 tokens  sliding_window, window=256\n", printed)
    assert '"prompt": "Once upon a time"' in printed

    server.signal(signal.SIGTERM)
    ends = [line for line in server.rest().splitlines() if line.endswith(" ends")]
    assert ends == ["worker ends", "worker ends", "engine ends"]
    assert server.process.wait() == 0


def test_ctrl_c_reaches_the_whole_group_and_is_an_orderly_stop(start: Start) -> None:
    server = start()
    pids = server.pids()
    for pid in (*pids, server.process.pid):  # as a terminal does
        os.kill(pid, signal.SIGINT)
    rest = server.rest()
    assert "Traceback" not in rest
    assert [line for line in rest.splitlines() if line.endswith(" ends")] == ["worker ends", "engine ends"]
    assert server.process.wait() == 0


def test_starts_dead_children_again(start: Start) -> None:
    server = start("engine_telling_its_socket")
    engine, worker = server.pids()
    os.kill(engine, signal.SIGKILL)
    server.read_until(
        "engine ended: killed by SIGKILL.* again in", "socket .* False", r"engine \d+ runs", "ready again"
    )
    os.kill(worker, signal.SIGTERM)  # ends in peace, but unasked
    server.read_until("worker-0 ended: exit code 0; .* again in", r"worker \d+ runs")
    server.signal(signal.SIGTERM)
    assert "announced" not in server.rest()
    assert server.process.wait() == 0


@pytest.mark.parametrize(
    ("engine", "worker", "message", "status"),
    [
        ("engine_refusing", "worker", "cannot start: there is no model in tiny", 2),
        ("engine_loading", "worker_refusing", "worker-0: there is no tokenizer in tiny", 2),
        ("engine_crashing", "worker", "engine ended before the server was ready: exit code 3", 1),
        ("engine_loading", "worker_crashing", "worker-0 ended before the server was ready: exit code 4", 1),
    ],
)
def test_a_child_that_cannot_start_ends_the_program(
    start: Start, engine: str, worker: str, message: str, status: int
) -> None:
    """Status 2 is for what the user must change."""
    server = start(engine, worker)
    rest = server.rest()
    assert message in rest
    assert "Traceback" not in rest
    assert server.process.wait() == status


def test_children_do_not_outlive_a_killed_supervisor(start: Start) -> None:
    server = start(worker="worker_deaf")
    server.pids()
    server.signal(signal.SIGKILL)
    assert "ends" not in server.rest()  # returns when no process holds the pipe: all are gone


def test_a_deaf_worker_is_killed_after_its_grace(start: Start) -> None:
    server = start(worker="worker_deaf", grace=0.2)
    server.pids()
    server.signal(signal.SIGTERM)
    rest = server.rest()
    assert "worker-0 did not end" in rest
    assert rest.rstrip().endswith("engine ends")
    assert server.process.wait() == 0


def test_a_second_ctrl_c_kills(start: Start) -> None:
    server = start(worker="worker_deaf")
    server.pids()
    server.signal(signal.SIGINT)
    server.read_until("stopping")
    server.signal(signal.SIGINT)
    assert "ends" not in server.rest()
    assert server.process.wait() == 130


def test_delay_doubles_to_its_limit_and_starts_over_after_health(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(supervisor, "monotonic", lambda: now)
    child = Child("engine", lambda name: pytest.fail("not started here"), Timing())
    child.healthy_from = now
    assert [child.postpone() for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert child.due == now + 30
    now += 61
    assert child.postpone() == 0.5


def test_how_a_process_ended() -> None:
    assert in_words(3) == "exit code 3"
    assert in_words(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert "memory" in in_words(-signal.SIGKILL)
    assert in_words(-200) == "killed by signal 200"


def test_the_socket_lies_in_a_private_directory_with_a_short_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with private_directory() as directory, socket.socket(socket.AF_UNIX) as unix:
        assert os.stat(directory).st_mode & 0o077 == 0
        path = os.path.join(directory, "engine.sock")
        assert len(path) < 104
        unix.bind(path)
    assert not os.path.exists(directory)
