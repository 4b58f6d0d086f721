"""`kvmux ray up` as a terminal runs it: signals to its whole process group, and what is left of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from server.version import get_version
from tests.cluster.ray_cluster import ROOT, SMALL, find_free_port, get_python, make_environment
from tests.end_to_end.server_process import PATIENCE, eventually

pytestmark = pytest.mark.ray

MARK = "TEST_MARK"  # a variable by which a test finds all processes of its own cluster


class Terminal:
    """A `kvmux ray up` in a process group of its own."""

    def __init__(self, output: Path, *flags: str) -> None:
        self.mark = f"{random.getrandbits(64):x}"
        self.url = f"http://127.0.0.1:{(port := find_free_port())}"
        self._output = output
        command = [get_python(), "-m", "server", "ray", "up", "--port", str(port), "--kv-memory", "32MiB", *SMALL]
        environment = make_environment() | {MARK: self.mark}
        with output.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )

    @property
    def printed(self) -> str:
        return self._output.read_text()

    def interrupt(self) -> None:
        """Press Ctrl-C: SIGINT to all processes of the group, those of Ray included, which do not mind."""
        os.killpg(self.process.pid, signal.SIGINT)

    @property
    def serves(self) -> bool:
        return f"kvmux {get_version()} serves" in self.printed

    def list_processes(self) -> list[str]:
        """Return the command lines of the cluster's processes that there still are."""
        found = []
        for each in psutil.process_iter():
            try:
                if each.environ().get(MARK) == self.mark and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(each.cmdline()))
            except psutil.Error:
                continue
        return found

    def wait(self) -> int:
        """Return the exit code, once no process is left."""
        code = self.process.wait(PATIENCE)
        eventually(lambda: not self.list_processes())
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(*flags: str) -> Terminal:
        started.append(Terminal(tmp_path / f"{len(started)}.log", *flags))
        return started[-1]

    yield start
    for each in started:
        print(each.printed)
        each.process.kill()
        each.process.wait()


def wait_until_it_serves(terminal: Terminal) -> None:
    eventually(lambda: terminal.process.poll() is not None or terminal.serves)
    assert terminal.process.poll() is None, "it did not come up"


@contextmanager
def reading(terminal: Terminal, method: str, path: str, **body: object) -> Iterator[list[str]]:
    """Read a stream in a thread during the block, at whose beginning an event has arrived.

    Yields the lines, which are complete after the block; an error is the last one.
    """
    lines: list[str] = []

    def read() -> None:
        try:
            with httpx.stream(method, terminal.url + path, json=body or None, timeout=PATIENCE) as response:
                for line in response.iter_lines():
                    lines.append(line)  # noqa: PERF402  # one by one, as the test looks at them meanwhile
        except httpx.TransportError as error:
            lines.append(f"error: {error!r}")

    thread = threading.Thread(target=read)
    thread.start()
    eventually(lambda: lines)
    try:
        yield lines
    finally:
        thread.join()


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_a_signal_lets_answers_end(start: Callable[..., Terminal], how: str) -> None:
    terminal = start("--drain-seconds", "60")
    wait_until_it_serves(terminal)
    body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with (
        reading(terminal, "POST", "/v1/completions", **body) as answer,
        reading(terminal, "GET", "/v1/live/events") as events,
    ):
        assert "data: [DONE]" not in answer, "the test is too slow to test anything"
        if how == "Ctrl-C":
            terminal.interrupt()
        else:  # sent to all, it would end Ray's own processes
            terminal.process.terminate()
    assert "data: [DONE]" in answer, answer[-3:]
    assert "error" not in json.dumps(answer)
    assert not [each for each in events if each.startswith("error")], events[-3:]
    assert terminal.wait() == 0


def test_a_second_signal_does_not_wait(start: Callable[..., Terminal]) -> None:
    terminal = start("--drain-seconds", "3600", "--body-timeout", "3600")
    wait_until_it_serves(terminal)

    def send_slowly() -> Iterator[bytes]:
        yield b"{"
        arrived.set()
        stop.wait(PATIENCE)

    arrived, stop = threading.Event(), threading.Event()

    def post() -> None:
        headers = {"content-type": "application/json"}
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{terminal.url}/v1/completions", content=send_slowly(), headers=headers, timeout=PATIENCE)

    thread = threading.Thread(target=post)
    thread.start()
    try:
        arrived.wait(PATIENCE)
        time.sleep(1.0)  # until the request has reached the API process
        terminal.interrupt()
        eventually(lambda: "stopping" in terminal.printed)
        time.sleep(1.0)
        assert terminal.process.poll() is None
        terminal.interrupt()
        assert terminal.wait() == 130
    finally:
        stop.set()
        thread.join()


def test_a_signal_ends_a_start(start: Callable[..., Terminal]) -> None:
    terminal = start("--replicas", "2")
    eventually(lambda: "starts Ray" in terminal.printed)
    time.sleep(random.uniform(0.0, 8.0))
    terminal.interrupt()
    assert terminal.wait() in (0, 130)


def test_nothing_is_left_of_a_killed_one(start: Callable[..., Terminal]) -> None:
    terminal = start()
    wait_until_it_serves(terminal)
    terminal.process.kill()
    assert terminal.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--metrics-port", "9"], "metrics_port"),
        (["--kv-memory", "1KiB"], "the replicas did not start"),
        (["--address", "127.0.0.1:1"], "no Ray cluster at address '127.0.0.1:1'"),
        (["--address", "nonsense"], "no Ray cluster at address 'nonsense'"),
    ],
)
def test_what_cannot_start_says_why(start: Callable[..., Terminal], flags: list[str], message: str) -> None:
    terminal = start(*flags)
    assert terminal.wait() == 2
    assert "\nkvmux: " in f"\n{terminal.printed}"
    assert message in terminal.printed
