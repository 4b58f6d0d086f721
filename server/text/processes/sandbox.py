"""The tokenizer of API workers: the model's own tokenizer and chat template run in processes with limits.

There are two lanes, each with one process that answers one call after another:

    short   for calls of little text; its process always runs. A call that takes long is ended, and sent again to the
    long    lane, where it delays only other long calls; its process ends when it has been idle for a while

Only the long lane refuses a call for its time, its memory or the end of its process. Knows neither HTTP nor the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from config.errors import SettingsError
from server.processes.framing import WireError, encode_frame
from server.text.errors import TextLimitError, TextRefused, TextUnavailable
from server.text.processes.messages import REFUSAL_ERRORS, Answer, Call, EncodeChat, Encoded, Refused, Start
from server.text.processes.text_process import FailureReason, ProcessFailed, TextProcess
from server.text.tokenizer import TokenizerBase

log = logging.getLogger(__name__)

SHORT_CALL = 2**16  # bytes; about 30 ms of work
SHORT_TIME = 1.0  # seconds after which a call is not short
SHORT_MEMORY = 2**28  # bytes
LOAD_MEMORY = 2**32  # bytes; the largest tokenizers take about one of the four GiB while they are read
MARGIN = 5.0  # seconds after which a process ends itself that should have been killed
MAX_QUEUED_CALLS, MAX_QUEUED_BYTES = 1024, 2**26  # that wait in a lane
LINGER = 300.0  # seconds that the process of the long lane is kept without calls
UNAVAILABLE = "texts cannot be tokenized at the moment; try again"
RESTART_DELAY = 1.0  # seconds before a process is started again that could not be


class CallLimits(NamedTuple):
    """What one call may take in the long lane."""

    seconds: float
    memory: int  # bytes beyond what the tokenizer itself takes


class SandboxedTokenizer(TokenizerBase):
    """Decodes in this process, by a table; leaves everything else to processes with limits."""

    def __init__(self, directory: Path, limits: CallLimits, *, linger: float = LINGER) -> None:
        """Load the directory's tokenizer in a process, and wait for it. Raises SettingsError.

        Enter it with `async with` afterwards, which ends the process.
        """
        path = str(directory.resolve())
        self._limits = limits
        short = CallLimits(min(SHORT_TIME, limits.seconds), min(SHORT_MEMORY, limits.memory))
        first = TextProcess(_make_start_message(path, short, with_vocabulary=True))
        try:
            super().__init__(first.wait_for_vocabulary())
        except BaseException:
            first.end_now()
            raise
        self._short = Lane(
            partial(_start_process, path, short), short.seconds, MAX_QUEUED_CALLS, MAX_QUEUED_BYTES, process=first
        )
        self._long = Lane(
            partial(_start_process, path, limits), limits.seconds, MAX_QUEUED_CALLS, MAX_QUEUED_BYTES, linger=linger
        )

    async def __aenter__(self) -> SandboxedTokenizer:
        await self._short.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(self._short.close(), self._long.close())

    async def answer(self, call: Call) -> Encoded:
        """Return the result of a call. Raises TextRefused, TextUnavailable."""
        try:
            answer = await self._run_call(serialize_call(call))
        except ProcessFailed as error:
            log.warning("a call to the model's tokenizer or chat template was ended: %s", error.reason)
            raise self._limit_error(call, error.reason) from None
        if isinstance(answer, Refused):
            raise REFUSAL_ERRORS[answer.kind](answer.message)
        return answer

    async def _run_call(self, request: bytes) -> Answer:
        if len(request) <= SHORT_CALL:
            try:
                return await self._short.run_call(request)
            except ProcessFailed as error:
                log.info("a short call to the model's tokenizer or chat template was ended: %s", error.reason)
        return await self._long.run_call(request)

    def _limit_error(self, call: Call, reason: FailureReason) -> TextLimitError:
        chat = isinstance(call, EncodeChat)
        program, what = ("chat template or tokenizer", "these messages") if chat else ("tokenizer", "this text")
        match reason:
            case "time":
                message = f"the model's {program} took more than {self._limits.seconds:g} s for {what}; send less"
                return TextLimitError(message, "text_timeout")
            case "memory":
                limit = self._limits.memory / 2**20
                message = f"the model's {program} needed more than {limit:,.0f} MiB of memory for {what}; send less"
                return TextLimitError(message, "text_memory")
        return TextLimitError(f"the model's {program} ended its process over {what}", "text_crash")


def serialize_call(call: Call) -> bytes:
    """Return a call as bytes. Raises TextRefused."""
    try:
        return encode_frame(pickle.dumps(call))
    except (RecursionError, WireError):
        raise TextRefused("what was sent is nested too deeply, or is too long; send less") from None


def _make_start_message(directory: str, limits: CallLimits, *, with_vocabulary: bool = False) -> Start:
    return Start(directory, limits.seconds + MARGIN, limits.memory, LOAD_MEMORY, with_vocabulary)


def _start_process(directory: str, limits: CallLimits) -> TextProcess:
    return TextProcess(_make_start_message(directory, limits))


# ---------------------------------------------------------------- a lane
class Lane:
    """Sends one call after another, in order of arrival. For one event loop only."""

    def __init__(
        self,
        start: Callable[[], TextProcess],
        seconds: float,
        max_calls: int,
        max_bytes: int,
        *,
        process: TextProcess | None = None,
        linger: float | None = None,
    ) -> None:
        """Make a lane whose calls may take `seconds` each; `process` is its first process, if one is given.

        Without `linger` a process always runs. With it, one is started by the first call and ends after that many
        seconds without a call.
        """
        self._make_process = start
        self._seconds = seconds
        self._max_calls, self._max_bytes = max_calls, max_bytes
        self._process = process
        self._linger = linger
        self._lock = asyncio.Lock()  # held while the process is used
        self._calls = self._bytes = 0  # waiting or being answered
        self._closed = False
        self._start_after = 0.0
        self._idle: asyncio.TimerHandle | None = None
        self._end_task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        if self._process is not None:
            await self._process.connect()

    async def run_call(self, request: bytes) -> Answer:
        """Return the answer to a framed call. Raises ProcessFailed, TextUnavailable.

        A call that is cancelled while it waits is removed. One that is cancelled while it is answered is answered all
        the same, and the lane then goes on with the next.
        """
        if self._calls >= self._max_calls or (self._calls and self._bytes + len(request) > self._max_bytes):
            raise TextUnavailable("too many texts wait to be tokenized; try again")
        self._calls += 1
        self._bytes += len(request)
        task = None
        try:
            await self._lock.acquire()
            task = asyncio.create_task(self._run_with_retry(request))
            task.add_done_callback(lambda task: self._on_call_done(task, len(request)))
            return await asyncio.shield(task)
        finally:
            if task is None:
                self._remove_call(len(request))

    def _on_call_done(self, task: asyncio.Task[Answer], size: int) -> None:
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller may be gone
        self._lock.release()
        self._remove_call(size)

    def _remove_call(self, size: int) -> None:
        self._calls -= 1
        self._bytes -= size

    async def close(self) -> None:
        """End the process; calls that wait raise TextUnavailable."""
        self._closed = True
        if self._idle is not None:
            self._idle.cancel()
        if self._process is not None:
            await self._process.end()
        await self._end_process_locked()

    # ------------------------------------------------------------ with the turn
    async def _run_with_retry(self, request: bytes) -> Answer:
        try:
            return await self._run_once(request)
        except ProcessFailed as error:
            if error.reason != "killed":
                raise
        return await self._run_once(request)  # once more: the call did not cause it

    async def _run_once(self, request: bytes) -> Answer:
        process = await self._get_ready_process()
        try:
            return await process.run_call(request, self._seconds)
        except ProcessFailed as error:
            raise ProcessFailed(_find_failure_reason(error, await self._end_process())) from None
        finally:
            await self._prepare_next()

    async def _get_ready_process(self) -> TextProcess:
        """Return a process that is ready. Raises TextUnavailable."""
        if self._process is not None and self._process.disconnected:
            await self._end_process()
        if self._process is None:
            await self._start_process()
        assert self._process is not None
        try:
            await self._process.wait_until_ready()
        except (ProcessFailed, SettingsError) as error:
            raise await self._handle_start_failure(error) from None
        return self._process

    async def _start_process(self) -> None:
        if self._closed or monotonic() < self._start_after:
            raise TextUnavailable(UNAVAILABLE)
        try:
            self._process = self._make_process()
            await self._process.connect()
        except OSError as error:
            raise await self._handle_start_failure(error) from None

    async def _handle_start_failure(self, error: Exception) -> TextUnavailable:
        """Clean up after a process that did not start; return the error to raise."""
        self._start_after = monotonic() + RESTART_DELAY
        await self._end_process()
        if not self._closed:
            log.error("the process that tokenizes did not start: %s", error)
        return TextUnavailable(UNAVAILABLE)

    async def _end_process(self) -> int:
        """End the process, if there is one; return its exit code."""
        process, self._process = self._process, None
        return 0 if process is None else await process.end()

    async def _prepare_next(self) -> None:
        """Have a process ready for the next call, or let it go if none comes."""
        if self._linger is None:
            if self._process is None:
                with contextlib.suppress(TextUnavailable):
                    await self._start_process()
            return
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(self._linger, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if not self._lock.locked():
            self._end_task = asyncio.create_task(self._end_process_locked())

    async def _end_process_locked(self) -> None:
        async with self._lock:
            await self._end_process()


def _find_failure_reason(error: ProcessFailed, exitcode: int) -> FailureReason:
    """Return why a call failed: the exit code tells more where the process just went away."""
    if error.reason != "crash":
        return error.reason
    ends: dict[int, FailureReason] = {
        -signal.SIGKILL: "killed",  # by the system or a person, not known to be the call's fault
        -signal.SIGABRT: "memory",  # Rust aborts when it gets no memory
        -signal.SIGALRM: "time",
    }
    return ends.get(exitcode, "crash")
