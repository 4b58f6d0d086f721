"""The supervisor with fake children: real processes, real signals. Waits for output, never for time."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import sleep
from typing import IO, Protocol

import psutil
import pytest

from server.processes import child as child_process
from server.processes import heartbeat as supervision
from server.processes.child import Child, Timing, describe_exit
from server.processes.child_process import STOP_SIGNAL
from server.processes.heartbeat import Heartbeat, Recovery, Watchdog
from server.processes.runtime_directory import remove_leftovers, runtime_directory


class Server:
    """A supervisor running in a process of its own, and what it and its children print."""

    def __init__(
        self,
        directory: Path,
        engine: str,
        worker: str,
        workers: int,
        grace: float,
        watchdog: float,
        under: Sequence[str],
    ) -> None:
        self.process = subprocess.Popen(
            [
                *under,
                sys.executable,
                "-m",
                "tests.processes.fake_children",
                engine,
                worker,
                str(workers),
                str(grace),
                str(watchdog),
            ],
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"TMPDIR": str(directory)},
        )
        assert self.process.stdout is not None
        self.output: IO[str] = self.process.stdout
        self.seen: list[str] = []

    def read_until(self, *patterns: str) -> list[re.Match[str]]:
        """Read until every pattern has matched a line of its own, in any order."""
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
        """Return the pids of the engine and the workers, once all run and the server is announced."""
        _, *running = self.read_until("announced", r"engine (\d+) runs", *[r"worker (\d+) runs"] * workers)
        return [int(match[1]) for match in running]

    def rest(self) -> str:
        """Return the output until the last process that could print has ended."""
        return self.output.read()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


class Start(Protocol):
    """Return a function that starts a server, which ends with the test; `under` is a command that runs another."""

    def __call__(
        self,
        engine: str = "engine",
        worker: str = "worker",
        *,
        workers: int = 1,
        grace: float = 30.0,
        watchdog: float = 60.0,
        under: Sequence[str] = (),
    ) -> Server: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def start(
        engine: str = "engine",
        worker: str = "worker",
        *,
        workers: int = 1,
        grace: float = 30.0,
        watchdog: float = 60.0,
        under: Sequence[str] = (),
    ) -> Server:
        servers.append(Server(tmp_path, engine, worker, workers, grace, watchdog, under))
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
    assert "512.0 MiB" in printed
    assert re.search(r"paged +131,072 tokens  default, block_size=16\n", printed)
    assert re.search(r"short +99,000 tokens  sliding_window, window=256\n", printed)
    assert '"prompt": "Once upon a time"' in printed

    server.signal(signal.SIGTERM)
    ends = [line for line in server.rest().splitlines() if line.endswith(" ends")]
    assert ends == ["worker ends", "worker ends", "engine ends"]
    assert server.process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_is_an_orderly_stop(start: Start, number: signal.Signals) -> None:
    """As a terminal and systemd send them."""
    server = start()
    server.pids()
    os.killpg(server.process.pid, number)
    rest = server.rest()
    assert "Traceback" not in rest
    assert [line for line in rest.splitlines() if line.endswith(" ends")] == ["worker ends", "engine ends"]
    assert server.process.wait() == 0


def test_a_server_under_nohup_goes_on_when_its_terminal_closes(start: Start) -> None:
    server = start(under=["nohup"])
    _, worker = server.pids()
    os.killpg(server.process.pid, signal.SIGHUP)
    os.kill(worker, signal.SIGKILL)
    server.read_until("worker-0 ended: killed by SIGKILL.* restarted in", r"worker \d+ runs")  # not while it stops
    server.signal(signal.SIGTERM)
    assert [line for line in server.rest().splitlines() if line.endswith(" ends")] == ["worker ends", "engine ends"]
    assert server.process.wait() == 0


def test_ctrl_c_stops_a_server_in_the_background_of_a_script(start: Start) -> None:
    """Though the script's shell starts it with SIGINT ignored; it would be left behind otherwise."""
    server = start(under=["sh", "-c", 'trap "" INT; exec "$@"', "sh"])
    server.pids()
    os.killpg(server.process.pid, signal.SIGINT)
    assert [line for line in server.rest().splitlines() if line.endswith(" ends")] == ["worker ends", "engine ends"]
    assert server.process.wait() == 0


def test_starts_dead_children_again(start: Start) -> None:
    server = start("engine_telling_its_socket")
    engine, worker = server.pids()
    os.kill(engine, signal.SIGKILL)
    server.read_until(
        "engine ended: killed by SIGKILL.* restarted in", "socket .* False", r"engine \d+ runs", "ready again"
    )
    os.kill(worker, STOP_SIGNAL)  # ends in peace, but unasked
    server.read_until("worker-0 ended: exit code 0; .* restarted in", r"worker \d+ runs")
    server.signal(signal.SIGTERM)
    assert "announced" not in server.rest()
    assert server.process.wait() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only there limits of another process can be set")
def test_a_child_that_the_system_refuses_to_start_is_tried_again(start: Start) -> None:
    server = start()
    engine, worker = server.pids()
    supervisor = psutil.Process(server.process.pid)
    allowed = supervisor.rlimit(psutil.RLIMIT_NOFILE)
    supervisor.rlimit(psutil.RLIMIT_NOFILE, (supervisor.num_fds() - 4, allowed[1]))
    os.kill(engine, signal.SIGKILL)
    server.read_until("engine cannot be restarted .*Too many open files.* trying again in")
    os.kill(worker, signal.SIGKILL)
    server.read_until("worker-0 cannot be restarted .*Too many open files.* trying again in")
    supervisor.rlimit(psutil.RLIMIT_NOFILE, allowed)
    server.read_until(r"engine \d+ runs", r"worker \d+ runs", "ready again")
    server.signal(signal.SIGTERM)
    assert "Traceback" not in server.rest()
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
    """Exit code 2 is for errors that the user has to fix."""
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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody kills a stopped process when its parent dies")
def test_stopped_children_do_not_outlive_a_killed_supervisor(start: Start) -> None:
    server = start(workers=2)
    for pid in server.pids(workers=2):
        os.kill(pid, signal.SIGSTOP)
    server.signal(signal.SIGKILL)
    server.rest()  # returns when no process holds the pipe: all are gone


def test_a_deaf_worker_is_killed_after_its_grace(start: Start) -> None:
    server = start(worker="worker_deaf", grace=0.2)
    server.pids()
    server.signal(signal.SIGTERM)
    rest = server.rest()
    assert "worker-0 did not end" in rest
    assert "engine ends" in rest  # before or after that line, which a thread of the log writes
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
    monkeypatch.setattr(child_process, "monotonic", lambda: 100.0)
    child = Child("engine", lambda name: pytest.fail("not started here"), Timing())
    child.watchdog = Watchdog(Heartbeat(multiprocessing.get_context("spawn")), 1.0)
    assert [child.schedule_restart() for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert child.start_at == 130
    child.watchdog.uptime = 61
    assert child.schedule_restart() == 0.5
    child.watchdog = Watchdog(Heartbeat(multiprocessing.get_context("spawn")), 1.0)
    assert child.schedule_restart() == 1, "it has died again at once"


def test_how_a_process_ended() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert "memory" in describe_exit(-signal.SIGKILL)
    assert describe_exit(-200) == "killed by signal 200"


# ---------------------------------------------------------------- children without a heartbeat
def test_an_engine_that_hangs_is_killed_and_its_stack_told(start: Start) -> None:
    server = start("engine_hanging", watchdog=3.0)
    server.pids()
    server.read_until("engine had no heartbeat for . s and is killed; its threads were here", "in hang_in_a_loop")
    server.read_until(
        "engine ended: killed, as its heartbeat had stopped; it is restarted in", r"engine \d+ runs", "ready again"
    )
    server.signal(signal.SIGTERM)
    assert "no heartbeat" not in server.rest(), "the next one, and the worker, are healthy"
    assert server.process.wait() == 0


def test_an_engine_that_hangs_is_killed_where_its_files_were_cleaned_up(start: Start, tmp_path: Path) -> None:
    server = start("engine_hanging", watchdog=3.0)
    server.pids()
    (stacks,) = tmp_path.glob("kvmux-*/engine.stacks")
    stacks.unlink()
    server.read_until("engine had no heartbeat for . s and is killed; it did not write where", "ready again")


def test_a_call_of_a_strategy_that_does_not_return_disables_the_strategy(start: Start) -> None:
    server = start("engine_in_a_call")
    server.read_until(
        "without {}",
        r"cache strategy 'short': locate\(\) did not return for \d\.\d s; the engine is killed",
        "cache strategy 'short' is disabled until the server is started again",
        r"without {'short': 'locate\(\) did not return for \d\.\d seconds'}",
        "the engine is ready again",
    )
    sleep(1.5)
    server.signal(signal.SIGTERM)
    assert "did not return" not in server.rest(), "the next engine is healthy"
    assert server.process.wait() == 0


def test_a_stopped_engine_does_not_disable_the_strategy_it_was_in(start: Start) -> None:
    """Stopping is not the strategy's fault, so the next engine uses the strategy again."""
    server = start("engine_stopped_in_a_call", watchdog=3.0)
    server.read_until("without {}")
    server.read_until("engine had no heartbeat for . s and is killed; it was stopped, by SIGSTOP", "without {}")
    server.signal(signal.SIGTERM)
    assert "did not return" not in "".join([*server.seen, server.rest()])
    assert server.process.wait() == 0


def test_the_last_strategy_is_not_disabled(start: Start) -> None:
    server = start("engine_always_in_a_call")
    server.read_until(
        r"without \[\]",
        r"without \['paged', 'contiguous', 'sliding_window'\]",
        "no other strategy is left, so 'short' is not disabled",
        r"without \['paged', 'contiguous', 'sliding_window'\]",
    )
    server.signal(signal.SIGTERM)
    server.rest()
    assert server.process.wait() == 0


def test_many_short_calls_are_no_long_one(start: Start) -> None:
    server = start("engine_in_short_calls")
    server.pids()
    sleep(2.5)
    server.signal(signal.SIGTERM)
    assert "did not return" not in server.rest()
    assert server.process.wait() == 0


@pytest.mark.parametrize(("which", "name"), [(0, "engine"), (1, "worker-0")])
def test_a_child_that_is_stopped_is_killed_and_started_again(start: Start, which: int, name: str) -> None:
    server = start(watchdog=3.0)
    os.kill(server.pids()[which], signal.SIGSTOP)
    server.read_until(f"{name} had no heartbeat for . s and is killed; it was stopped, by SIGSTOP")
    server.read_until(rf"{name.removesuffix('-0')} \d+ runs")
    server.signal(signal.SIGTERM)
    assert "no heartbeat" not in server.rest()
    assert server.process.wait() == 0


def test_a_worker_that_is_stopped_while_it_loads_is_killed(start: Start) -> None:
    server = start(worker="worker_loading", watchdog=3.0)
    _, worker = server.pids()
    os.kill(worker, signal.SIGSTOP)
    server.read_until("worker-0 had no heartbeat for . s and is killed; it was stopped, by SIGSTOP")
    server.read_until(r"worker \d+ runs")


def test_a_worker_that_loads_for_long_is_not_killed(start: Start) -> None:
    """The engine is stopped meanwhile, which shows that the watchdog's time has passed."""
    server = start(worker="worker_loading", watchdog=3.0)
    engine, _ = server.pids()
    os.kill(engine, signal.SIGSTOP)
    server.read_until("engine had no heartbeat")
    server.signal(signal.SIGTERM)
    server.rest()
    assert "worker-0 gave" not in "".join(server.seen)


def test_time_that_nobody_looked_at_is_not_held_against_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(supervision, "monotonic", lambda: now)
    heartbeat = Heartbeat(multiprocessing.get_context("spawn"))
    watch = Watchdog(heartbeat, interval=1.0)
    for _ in range(25):
        now += 1
        watch.check_heartbeat()
    assert watch.silent_seconds == 25 - supervision.BOOT_SECONDS, "the process starts"
    heartbeat.beat()
    watch.check_heartbeat()
    for _ in range(5):
        now += 1
        watch.check_heartbeat()
    assert watch.silent_seconds == 5
    now += 3600  # the machine slept
    watch.check_heartbeat()
    assert watch.silent_seconds == 7
    heartbeat.beat()
    watch.check_heartbeat()
    assert (watch.silent_seconds, watch.uptime) == (0, 7)


def test_loading_is_no_part_of_a_childs_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(supervision, "monotonic", lambda: now)
    monkeypatch.setattr(supervision, "LOADING_BEAT_INTERVAL", 0.001)
    heartbeat = Heartbeat(multiprocessing.get_context("spawn"))
    watch = Watchdog(heartbeat, interval=1.0)
    heartbeat.beat_while_loading()
    for _ in range(50):
        before = heartbeat.total_beats
        while heartbeat.total_beats == before:
            sleep(0.001)
        now += 1
        watch.check_heartbeat()
        assert (watch.silent_seconds, watch.uptime) == (0, 0), "it loads"
    heartbeat.beat()
    watch.check_heartbeat()
    now += 1
    heartbeat.beat()
    watch.check_heartbeat()
    assert (watch.silent_seconds, watch.uptime) == (0, 1)
    while any(thread.name == "heartbeat" for thread in threading.enumerate()):
        sleep(0.001)


def test_when_the_engine_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(supervision, "monotonic", lambda: now)
    recovery = Recovery(multiprocessing.get_context("spawn"))
    recovery.record_start(now)
    now += 8
    recovery.extend_if_late()
    assert recovery.estimate_seconds() == 8, "the first start: as long again"
    now += 2
    recovery.record_ready()
    assert recovery.estimate_seconds() == 10, "what a start takes, while it serves"
    recovery.record_start(now + 4)  # it died, and is due in 4 s
    assert recovery.estimate_seconds() == 14
    now += 5
    recovery.record_start(now)
    recovery.extend_if_late()
    assert recovery.estimate_seconds() == 10
    now += 16
    assert recovery.estimate_seconds() == 0
    recovery.extend_if_late()
    assert recovery.estimate_seconds() == 16, "it is late"


# ---------------------------------------------------------------- the directory of the socket
def test_the_socket_lies_in_a_private_directory_with_a_short_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with runtime_directory("http://127.0.0.1:8000") as directory, socket.socket(socket.AF_UNIX) as unix:
        assert os.stat(directory).st_mode & 0o077 == 0
        path = os.path.join(directory, "engine.sock")
        assert len(path) < 104
        unix.bind(path)
    assert not os.path.exists(directory)


def test_the_directory_is_locked_against_those_who_clean_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd-tmpfiles removes old files from /tmp, except in directories that are locked."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with runtime_directory("http://127.0.0.1:8000") as directory:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)


def test_what_a_killed_supervisor_left_is_removed_by_the_next(start: Start, tmp_path: Path) -> None:
    killed, other = start("engine_telling_its_socket"), start("engine_telling_its_socket")
    folders = []
    for server in (killed, other):
        said, _ = server.read_until(r"socket (.*) False", "announced")
        folders.append(Path(said[1]).parent)
    foreign = tmp_path / "kvmux-somebodys"  # without a lock
    foreign.mkdir()
    (tmp_path / "kvmux-link").symlink_to(foreign)
    killed.signal(signal.SIGKILL)
    killed.rest()
    assert [folder.exists() for folder in folders] == [True, True]
    start().pids()
    assert [folder.exists() for folder in folders] == [False, True], "the other one runs"
    assert foreign.exists()
    other.signal(signal.SIGTERM)
    other.rest()
    assert not folders[1].exists()


def test_a_directory_is_nobodys_leftover_before_it_is_locked(tmp_path: Path) -> None:
    """The lock file has its name only while it is locked."""
    made = tmp_path / "kvmux-just-made"
    made.mkdir()
    (made / "lock.new").touch()
    remove_leftovers(tmp_path)
    assert made.exists()
    (made / "lock.new").rename(made / "lock")
    remove_leftovers(tmp_path)
    assert not made.exists()
