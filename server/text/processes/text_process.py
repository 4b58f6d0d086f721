"""A handle of one process that tokenizes or checks grammars: it starts it, sends it calls, and kills it.

The process itself ends when a call takes too much CPU time. The handle only sees to it that a process ends that no
longer works, for example one that waits for ever. Its methods block, so each queue of calls (`sandbox.py`) has a
thread for them. The caller decides what happens when a call fails.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from time import monotonic
from typing import Literal, TypeAlias

import msgspec
import psutil

from config.errors import SettingsError
from server.processes.framing import FrameDecoder, WireError, encode_frame
from server.text.processes.messages import (
    Answer,
    Broken,
    Encoded,
    ProcessMessage,
    Refused,
    Start,
    TokenizerLoaded,
    VocabularyData,
)

MODULE = "server.text.processes.sandbox_process"
MEMORY_LIMIT_ENFORCED = sys.platform != "darwin"  # whether the system enforces RLIMIT_AS
MEMORY_POLL_INTERVAL = 0.05  # seconds between two readings of the process's memory, where no limit is enforced
# Seconds between two looks at the CPU time of a process that owes an answer. If it has used none in between, it hangs:
# on a busy machine even a waiting process gets the 10 ms in which the system counts.
STALL_SECONDS = 10.0
CHUNK = 2**18  # most bytes read from the socket at a time
# Environment variables that the process inherits: none that may hold secrets.
INHERITED = ("PATH", "TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")

FailureReason: TypeAlias = Literal["time", "memory", "killed", "stalled", "crash"]
# Why a process has ended, by its exit code; "crash" for all others
EXIT_REASONS: Mapping[int, FailureReason] = {
    -signal.SIGKILL: "killed",  # by the system or a person, perhaps not because of the call
    0: "killed",  # by itself, as there were no calls for a while
    -signal.SIGABRT: "memory",  # Rust aborts when it gets no memory
    -signal.SIGPROF: "time",
}
_DECODER: msgspec.msgpack.Decoder[ProcessMessage] = msgspec.msgpack.Decoder(ProcessMessage)


class ProcessFailed(Exception):
    """Raised for a call that the process did not answer, with the reason; the process cannot be used any more."""

    def __init__(self, reason: FailureReason) -> None:
        super().__init__(reason)
        self.reason = reason


class TextProcess:
    """Handle of a process that tokenizes or checks grammars, which is started when the handle is made.

    Call `load`, then `run_call` any number of times, and `end`.
    """

    def __init__(self, start: Start, *, memory_limit: int | None = None, stall_seconds: float = STALL_SECONDS) -> None:
        """Start the process. Raises OSError when the system cannot start more processes.

        With `memory_limit`, the handle watches the process's memory and fails a call that takes more bytes. By
        default it does so only where the system does not enforce the process's own limit.
        """
        if memory_limit is None and not MEMORY_LIMIT_ENFORCED:
            memory_limit = start.memory
        self._start = start
        self._memory_limit = memory_limit  # from when it has loaded, it includes the memory that is then in use
        self._stall_seconds = stall_seconds
        self._frames: FrameDecoder[ProcessMessage] = FrameDecoder(_DECODER.decode)
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _start_program(theirs, "texts" if isinstance(start.source, str) else "grammars")
        except OSError:
            self._socket.close()
            raise

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def load(self) -> VocabularyData | None:
        """Wait until the process has loaded what Start names; return the vocabulary if Start asks for it.

        Raises SettingsError if it cannot be loaded.
        """
        where = f"model: {self._start.source_name}"
        try:
            first = self._exchange(encode_frame(pickle.dumps(self._start)), None)
        except ProcessFailed as error:
            match error.reason:
                case "stalled":
                    raise SettingsError(f"{where} makes the process that loads it hang; is it damaged?") from None
                case "time":
                    limit = f"{self._start.load_seconds:g} s of CPU time"
                    raise SettingsError(f"{where} takes more than {limit} to load") from None
            raise SettingsError(f"{where} ends the process that loads it; is it damaged?") from None
        if isinstance(first, Broken):
            raise SettingsError(first.message)
        if not isinstance(first, TokenizerLoaded):
            raise SettingsError(f"{where} makes the process that loads it answer nonsense; is it damaged?")
        if self._memory_limit is not None:
            self._memory_limit += self._read_memory()
        return first.vocabulary

    def run_call(self, call: bytes) -> Answer:
        """Return the answer to a call, given as the bytes of one frame.

        Raises ProcessFailed if none comes; the process cannot be used after that.
        """
        answer = self._exchange(call, self._memory_limit)
        if isinstance(answer, Refused) and answer.kind == "memory":
            raise ProcessFailed("memory")
        if not isinstance(answer, Encoded | Refused):
            raise ProcessFailed("crash")
        return answer

    def _exchange(self, frame: bytes, memory_limit: int | None) -> ProcessMessage:
        """Send a message and return the answer. Raises ProcessFailed."""
        try:
            self._socket.settimeout(self._stall_seconds)
            self._socket.sendall(frame)
            self._socket.settimeout(self._stall_seconds if memory_limit is None else MEMORY_POLL_INTERVAL)
            return self._receive(memory_limit)
        except TimeoutError:
            raise ProcessFailed("stalled") from None
        except WireError:
            raise ProcessFailed("crash") from None
        except OSError:  # the process has closed its end of the socket
            raise ProcessFailed(self._find_exit_reason()) from None

    def _receive(self, memory_limit: int | None) -> ProcessMessage:
        """Return the next message. Raises ProcessFailed, or TimeoutError if the process uses no CPU time."""
        used, since = -1.0, monotonic()  # seconds of CPU time, and since when it is so many
        while True:
            try:
                data = self._socket.recv(CHUNK)
            except TimeoutError:
                if memory_limit is not None and self._read_memory() > memory_limit:
                    raise ProcessFailed("memory") from None
                before, used = used, self._read_cpu_time()
                if used > before:
                    since = monotonic()
                elif monotonic() - since >= self._stall_seconds:
                    raise
                continue
            if not data:
                raise ProcessFailed(self._find_exit_reason())
            if (message := next(self._frames.feed(data), None)) is not None:
                return message

    def _find_exit_reason(self) -> FailureReason:
        """Return why the process ends by itself; kill it if it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        return EXIT_REASONS.get(self.end(), "crash")

    def _read_memory(self) -> int:
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def _read_cpu_time(self) -> float:
        """Return the seconds of CPU time that the process has used."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
            return float(times.user + times.system)
        except psutil.Error:
            return 0.0

    def kill(self) -> None:
        """Kill the process; a call that runs in another thread fails then."""
        self._process.kill()

    def end(self) -> int:
        """Kill the process if it still runs, wait until it is gone, and return its exit code."""
        self._socket.close()
        self._process.kill()
        return self._process.wait()


def _start_program(theirs: socket.socket, role: str) -> subprocess.Popen[bytes]:
    """Start the program with the socket `theirs` as standard input.

    It gets a process group of its own, so that Ctrl-C ends only the server, which then ends it. `role` is an argument
    that only people read, in a list of processes.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE, role],
        stdin=theirs.fileno(),
        stdout=subprocess.DEVNULL,
        cwd="/",
        env=make_environment(os.environ),
        process_group=0,
    )


def make_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a tokenizer process: this process's module path, no additional threads, no secrets."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    alone = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "PYTHONPATH": path}
    return {name: ours[name] for name in INHERITED if name in ours} | alone
