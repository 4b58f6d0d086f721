"""A worker's handle of one process that tokenizes or checks grammars: it starts it, sends it calls, and kills it.

The process itself ends when a call takes too much CPU time. The worker only sees to it that a process ends that no
longer works, for example one that waits for ever. The caller decides what happens when a call fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias, cast

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
# Signals that are blocked in tokenizer processes: they may be sent to the worker's whole process group.
BLOCKED_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
# Environment variables that the process inherits: none that may hold secrets.
INHERITED = ("PATH", "TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")

FailureReason: TypeAlias = Literal["time", "memory", "killed", "stalled", "crash"]
_DECODER: msgspec.msgpack.Decoder[ProcessMessage] = msgspec.msgpack.Decoder(ProcessMessage)


class ProcessFailed(Exception):
    """Raised for a call that the process did not answer, with the reason; the process cannot be used any more."""

    def __init__(self, reason: FailureReason) -> None:
        super().__init__(reason)
        self.reason = reason


class TextProcess(asyncio.Protocol):
    """Handle of a process that tokenizes or checks grammars, which is started when the handle is made.

    Call `connect`, `wait_until_ready`, then `run_call` any number of times, and `end`.
    """

    def __init__(self, start: Start, *, memory_limit: int | None = None, stall_seconds: float = STALL_SECONDS) -> None:
        """Start the process. Raises OSError when the system cannot start more processes.

        With `memory_limit`, this worker watches the process's memory and fails a call that takes more bytes. By
        default the worker does so only where the system does not enforce the process's own limit.
        """
        if memory_limit is None and not MEMORY_LIMIT_ENFORCED:
            memory_limit = start.memory
        self._start = start
        self._memory_limit = memory_limit
        self._stall_seconds = stall_seconds
        self._frames: FrameDecoder[ProcessMessage] = FrameDecoder(_DECODER.decode)
        self._transport: asyncio.WriteTransport | None = None
        self._answer_future: asyncio.Future[ProcessMessage] | None = None
        self._loaded = False
        self._idle_memory = 0  # bytes of memory in use after loading
        self._stall_timer: asyncio.TimerHandle
        self._memory_timer: asyncio.TimerHandle | None = None
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _start_program(theirs, "texts" if isinstance(start.source, str) else "grammars")
        except OSError:
            self._socket.close()
            raise
        self.pid = self._process.pid
        self.disconnected = False  # whether the process's end of the socket is closed

    def wait_for_vocabulary(self) -> VocabularyData:
        """Wait, without an event loop, until the tokenizer is loaded; return its vocabulary.

        Raises SettingsError if it cannot be loaded.
        """
        where = f"model: the tokenizer in {self._start.source!s}"
        try:
            self._socket.sendall(self._encode_start())
            first = self._read_first()
        except TimeoutError:
            raise SettingsError(f"{where} makes the process that loads it hang; is it damaged?") from None
        except (OSError, WireError):
            first = None
        if isinstance(first, Broken):
            raise SettingsError(first.message)
        if not isinstance(first, TokenizerLoaded) or first.vocabulary is None:
            if self.end_now() == -signal.SIGPROF:
                raise SettingsError(f"{where} takes more than {self._start.load_seconds:g} s of CPU time to load")
            raise SettingsError(f"{where} ends the process that loads it; is it damaged?")
        self._on_loaded()
        return first.vocabulary

    def _encode_start(self) -> bytes:
        return encode_frame(pickle.dumps(self._start))

    def _read_first(self) -> ProcessMessage | None:
        """Return the process's first message; None if it ends. Raises TimeoutError if it hangs."""
        self._socket.settimeout(self._stall_seconds)
        used = -1.0
        while True:
            try:
                data = self._socket.recv(CHUNK)
            except TimeoutError:
                before, used = used, self._read_cpu_time()
                if used <= before:
                    raise
                continue
            if not data:
                return None
            if (message := next(self._frames.feed(data), None)) is not None:
                return message

    # ------------------------------------------------------------ on an event loop
    async def connect(self) -> None:
        """Connect to the process, and have it load what its first message names."""
        loop = asyncio.get_running_loop()
        if not self._loaded:
            self._answer_future = loop.create_future()
        self._socket.setblocking(False)
        await loop.create_unix_connection(lambda: self, sock=self._socket)
        if not self._loaded:
            assert self._transport is not None
            self._transport.write(self._encode_start())

    async def wait_until_ready(self) -> None:
        """Wait until the process has loaded.

        Raises SettingsError if the model's files cannot be used, ProcessFailed if the process ends or is stuck.
        """
        if self._loaded:
            return
        first = await self._wait_for_answer()
        if isinstance(first, Broken):
            raise SettingsError(first.message)
        if not isinstance(first, TokenizerLoaded):
            raise ProcessFailed("crash")
        self._on_loaded()

    def _on_loaded(self) -> None:
        self._loaded = True
        if self._memory_limit is not None:
            self._idle_memory = self._read_memory()

    async def run_call(self, call: bytes) -> Answer:
        """Return the answer to a call, given as the bytes of one frame.

        Raises ProcessFailed if none comes; the process cannot be used after that.
        """
        if self._transport is None or self.disconnected:
            raise ProcessFailed("killed")
        self._answer_future = asyncio.get_running_loop().create_future()
        self._transport.write(call)
        answer = await self._wait_for_answer()
        if isinstance(answer, Refused) and answer.kind == "memory":
            raise ProcessFailed("memory")
        if not isinstance(answer, Encoded | Refused):
            raise ProcessFailed("crash")
        return answer

    async def _wait_for_answer(self) -> ProcessMessage:
        assert self._answer_future is not None, "no call was sent"
        self._check_later(-1.0)
        if self._memory_limit is not None and self._loaded:
            self._check_memory(self._idle_memory + self._memory_limit)
        try:
            return await self._answer_future
        finally:
            self._stall_timer.cancel()
            if self._memory_timer is not None:
                self._memory_timer.cancel()

    def _check_later(self, used: float) -> None:
        self._stall_timer = asyncio.get_running_loop().call_later(self._stall_seconds, self._check_progress, used)

    def _check_progress(self, before: float) -> None:
        """Fail the call if the process has used no CPU time since it had used `before` seconds; else check later."""
        used = self._read_cpu_time()
        if used <= before:
            self._fail("stalled")
        else:
            self._check_later(used)

    def _check_memory(self, limit: int) -> None:
        """Fail the call if the process takes more than `limit` bytes; else check later."""
        if self._read_memory() > limit:
            self._fail("memory")
        else:
            loop = asyncio.get_running_loop()
            self._memory_timer = loop.call_later(MEMORY_POLL_INTERVAL, self._check_memory, limit)

    def _fail(self, reason: FailureReason) -> None:
        if self._answer_future is not None and not self._answer_future.done():
            self._answer_future.set_exception(ProcessFailed(reason))
            self._answer_future.exception()  # marks the exception as retrieved, as the waiting task may be gone

    def _read_memory(self) -> int:
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def _read_cpu_time(self) -> float:
        """Return the seconds of CPU time that the process has used."""
        try:
            times = psutil.Process(self.pid).cpu_times()
            return float(times.user + times.system)
        except psutil.Error:
            return 0.0

    async def end(self) -> int:
        """Kill the process if it still runs, wait until it is gone, and return its exit code."""
        if self._transport is None:
            self._socket.close()
        else:
            self._transport.abort()
        if self.disconnected:  # if it is ending by itself, wait: its exit code tells why
            with contextlib.suppress(subprocess.TimeoutExpired):
                return await asyncio.to_thread(self._process.wait, 1)
        self._process.kill()
        return await asyncio.to_thread(self._process.wait)

    def end_now(self) -> int:
        """End a process that was never connected, wait until it is gone, and return its exit code."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # if it is ending by itself, its exit code tells why
            return self._process.wait(1)
        self._process.kill()
        return self._process.wait()

    # ------------------------------------------------------------ asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                if self._answer_future is not None and not self._answer_future.done():
                    self._answer_future.set_result(message)
        except WireError:
            self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.disconnected = True
        self._fail("crash")


def _start_program(theirs: socket.socket, role: str) -> subprocess.Popen[bytes]:
    """Start the program with the socket `theirs` as standard input, and with BLOCKED_SIGNALS blocked.

    `role` is an argument that only people read, in a list of processes.
    """
    with _block_signals(BLOCKED_SIGNALS):
        return subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, role],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            cwd="/",
            env=make_environment(os.environ),
        )


def make_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a tokenizer process: this process's module path, no additional threads, no secrets."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    alone = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "PYTHONPATH": path}
    return {name: ours[name] for name in INHERITED if name in ours} | alone


@contextlib.contextmanager
def _block_signals(signals: set[signal.Signals]) -> Iterator[None]:
    """Block signals in the processes that are started within the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
