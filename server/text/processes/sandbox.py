"""The tokenizer of API workers: the model's own tokenizer and chat template run in processes with limits.

There are three queues, each with one process that answers one call at a time:

    short     for calls of little text; its process always runs. A call that takes long is sent to the long queue.
    long      for all other texts, so that they delay only one another; its process ends after a while without calls.
    grammar   for the grammars, schemas and regular expressions of clients; its process runs from the first on.

Only the last two refuse a call for its time, its memory or a crash. Limits of time are of CPU time.
Knows neither HTTP nor the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import msgspec

from config.errors import SettingsError
from server.processes.framing import WireError, encode_frame
from server.text.errors import TextLimitError, TextRefused, TextUnavailable
from server.text.processes.grammar_checks import GrammarCheckCache
from server.text.processes.messages import (
    REFUSAL_ERRORS,
    Answer,
    Call,
    ChatDefaults,
    CheckGrammar,
    EncodeChat,
    Encoded,
    Refused,
    Start,
    VocabularyData,
)
from server.text.processes.text_process import STALL_SECONDS, FailureReason, ProcessFailed, TextProcess
from server.text.tokenizer import TokenizerBase

log = logging.getLogger(__name__)

SHORT_CALL = 2**16  # most bytes of a call that goes to the short queue; about 30 ms of work
SHORT_TIME = 1.0  # seconds of CPU time that a call may take in the short queue
SHORT_MEMORY = 2**28  # most bytes of memory that a call may take in the short queue
LOAD_MEMORY = 2**32  # most bytes of memory that loading may take; the largest tokenizers take about 1 GiB
MAX_QUEUED_CALLS, MAX_QUEUED_BYTES = 1024, 2**26  # for each queue
# Most bytes of the stack while grammars are checked. The engine's threads have several times as much, so that a grammar
# that exhausts a stack ends the process that checks it, and never gets to the engine.
GRAMMAR_STACK = 2**21
LINGER = 300.0  # seconds that the process of the long queue is kept while there are no calls
UNAVAILABLE = "texts cannot be tokenized at the moment; try again"
RESTART_DELAY = 1.0  # seconds after a process failed to start until another is started


class CallLimits(NamedTuple):
    """The time and memory that one call may take in the long queue, or in that of grammars."""

    seconds: float  # of CPU time
    memory: int  # most bytes that a call may take beyond those in use after loading the tokenizer


DEFAULT_GRAMMAR_LIMITS = CallLimits(5.0, 2**29)
NO_CALLS = CallLimits(SHORT_TIME, SHORT_MEMORY)  # of a process that is only loaded


class SandboxedTokenizer(TokenizerBase):
    """A tokenizer that decodes in the API worker's process, by a table, and does the rest in processes with limits."""

    def __init__(
        self,
        directory: Path,
        limits: CallLimits,
        grammar_limits: CallLimits = DEFAULT_GRAMMAR_LIMITS,
        *,
        chat: ChatDefaults = ChatDefaults(),  # noqa: B008, as it is immutable
        linger: float = LINGER,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """Load the directory's tokenizer in a process, and wait for it. Raises SettingsError if it cannot be loaded.

        `limits` apply to texts, and `grammar_limits` to the check of a grammar. Use it within `async with`, which
        ends the processes.
        """
        path = str(directory.resolve())
        self._limits, self._grammar_limits = limits, grammar_limits
        short = CallLimits(min(SHORT_TIME, limits.seconds), min(SHORT_MEMORY, limits.memory))
        make_start = partial(Start, load_memory=LOAD_MEMORY, chat=chat)
        first = TextProcess(make_start(path, *short, with_vocabulary=True), stall_seconds=stall_seconds)
        try:
            vocabulary = first.load()
            assert vocabulary is not None, "Start asks for it"
            super().__init__(vocabulary)
        except BaseException:
            first.end()
            raise

        def make_queue(start: Start, process: TextProcess | None = None) -> CallQueue:
            start_process = partial(TextProcess, start, stall_seconds=stall_seconds)
            return CallQueue(start_process, MAX_QUEUED_CALLS, MAX_QUEUED_BYTES, process)

        self._short = make_queue(make_start(path, *short), first)
        self._long = make_queue(make_start(path, *limits, linger=linger))
        self._grammars = make_queue(
            make_start(msgspec.msgpack.encode(vocabulary), *grammar_limits, stack=GRAMMAR_STACK)
        )
        self._checks = GrammarCheckCache(self._check_grammar)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(self._short.close(), self._long.close(), self._grammars.close())

    async def answer(self, call: Call) -> Encoded:
        """Return the ids, the text or both that `call` (Encode, EncodeChat, Infill, Decode, CheckGrammar) asks for.

        Raises TextRefused for a text that cannot be encoded, TextUnavailable if a later attempt may succeed.
        """
        if isinstance(call, CheckGrammar):
            return await self._checks.check(call)
        return await self._answer(call, self._run_call(serialize_call(call)))

    async def _check_grammar(self, call: CheckGrammar) -> Encoded:
        return await self._answer(call, self._grammars.run_call(serialize_call(call)))

    async def _answer(self, call: Call, running: Awaitable[Answer]) -> Encoded:
        """Return the answer to a call that runs. Raises TextRefused and TextUnavailable."""
        try:
            answer = await running
        except ProcessFailed as error:
            work = "check of a grammar" if isinstance(call, CheckGrammar) else "call to the tokenizer or chat template"
            log.warning("a %s was ended: %s", work, error.reason)
            if error.reason == "stalled":  # because of the machine, or by a fault of ours
                raise TextUnavailable(UNAVAILABLE) from None
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
        if isinstance(call, CheckGrammar):
            return _make_grammar_limit_error(reason, self._grammar_limits)
        chat = isinstance(call, EncodeChat)
        program, text = ("chat template or tokenizer", "these messages") if chat else ("tokenizer", "this text")
        match reason:
            case "time":
                limit = self._limits.seconds
                message = f"the model's {program} took more than {limit:g} s of CPU time for {text}; send less"
                return TextLimitError(message, "text_timeout")
            case "memory":
                limit = self._limits.memory / 2**20
                message = f"the model's {program} needed more than {limit:,.0f} MiB of memory for {text}; send less"
                return TextLimitError(message, "text_memory")
        return TextLimitError(f"the model's {program} crashed on {text}", "text_crash")


def _make_grammar_limit_error(reason: FailureReason, limits: CallLimits) -> TextLimitError:
    match reason:
        case "time":
            message = f"checking it took more than {limits.seconds:g} s of CPU time; send a simpler one"
            return TextLimitError(message, "grammar_timeout")
        case "memory":
            message = f"checking it took more than {limits.memory / 2**20:,.0f} MiB of memory; send a simpler one"
            return TextLimitError(message, "grammar_memory")
    return TextLimitError("it is nested too deeply to be checked; send a simpler one", "grammar_crash")


def serialize_call(call: Call) -> bytes:
    """Return a call as the bytes of one frame. Raises TextRefused if it is nested too deeply or too long."""
    try:
        return encode_frame(pickle.dumps(call))
    except (RecursionError, WireError):
        raise TextRefused("the text or messages are too long or nested too deeply; send less") from None


def load_vocabulary(directory: Path) -> VocabularyData:
    """Return a tokenizer's vocabulary, loaded in a process that has ended. Raises SettingsError if it cannot be loaded.

    For processes that only need the table of tokens; blocks until it is loaded.
    """
    process = TextProcess(Start(str(directory.resolve()), *NO_CALLS, LOAD_MEMORY, with_vocabulary=True))
    try:
        vocabulary = process.load()
    finally:
        process.end()
    assert vocabulary is not None, "Start asks for it"
    return vocabulary


# ---------------------------------------------------------------- one queue
class CallQueue:
    """Has a process answer calls one at a time, in order of arrival. For one event loop only.

    A thread of the queue's own sends them and waits. It starts the process for the first call, and again whenever it
    has failed.
    """

    def __init__(
        self, start: Callable[[], TextProcess], max_calls: int, max_bytes: int, process: TextProcess | None = None
    ) -> None:
        """Make a queue; `process` is its first process, which has loaded, if one is given."""
        self._make_process = start
        self._max_calls, self._max_bytes = max_calls, max_bytes
        self._process = process
        self._thread = ThreadPoolExecutor(1)
        self._calls = self._bytes = 0  # number and bytes of calls that wait or are being answered
        self._closed = False
        self._start_after = 0.0

    async def run_call(self, request: bytes) -> Answer:
        """Return the answer to a call, which is given as the bytes of one frame.

        Raises ProcessFailed if the process does not answer, TextUnavailable if too many calls wait or none can run.
        A call that is cancelled while it waits is removed. If the process is already answering it, the next call
        waits until the answer is complete.
        """
        if self._closed:
            raise TextUnavailable(UNAVAILABLE)
        if self._calls >= self._max_calls or (self._calls and self._bytes + len(request) > self._max_bytes):
            raise TextUnavailable("too many texts wait to be tokenized; try again")
        self._calls += 1
        self._bytes += len(request)
        try:
            return await asyncio.wrap_future(self._thread.submit(self._run_with_retry, request))
        finally:
            self._calls -= 1
            self._bytes -= len(request)

    async def close(self) -> None:
        """End the process; calls that wait raise TextUnavailable."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        await asyncio.to_thread(self._thread.shutdown)
        self._end_process()

    # ------------------------------------------------------------ methods that the queue's thread calls
    def _run_with_retry(self, request: bytes) -> Answer:
        try:
            return self._run_once(request)
        except ProcessFailed as error:
            if error.reason != "killed":
                raise
        return self._run_once(request)  # a second attempt: the kill may not be due to the call

    def _run_once(self, request: bytes) -> Answer:
        process = self._get_process()
        try:
            return process.run_call(request)
        except ProcessFailed:
            self._end_process()
            with contextlib.suppress(RuntimeError):  # RuntimeError: the queue is being closed
                self._thread.submit(self._get_process)  # for the next call
            raise

    def _get_process(self) -> TextProcess:
        """Return a process that has loaded the tokenizer. Raises TextUnavailable if it cannot be started."""
        if self._process is not None and self._process.has_ended():
            self._end_process()
        if self._process is None:
            if self._closed or monotonic() < self._start_after:
                raise TextUnavailable(UNAVAILABLE)
            try:
                self._process = self._make_process()
                self._process.load()
            except (OSError, SettingsError) as error:
                self._start_after = monotonic() + RESTART_DELAY
                self._end_process()
                if not self._closed:
                    log.error("a process that tokenizes or checks grammars did not start: %s", error)
                raise TextUnavailable(UNAVAILABLE) from None
        return self._process

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()
