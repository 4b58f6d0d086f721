"""The tokenizer of API workers: the model's own tokenizer and chat template run in processes with limits.

There are two lanes, each with one process that answers one call after another:

    short   for calls of little text; its process always runs. A call that takes long is ended, and sent again to the
    long    lane, where it delays only other long calls; its process ends when it has been idle for a while

Only the long lane refuses a call for its time, its memory or the end of its process. Knows neither HTTP nor the engine.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from functools import partial
from pathlib import Path
from typing import NamedTuple

from server.processes.framing import WireError, encode_frame
from server.text.errors import TextLimitError, TextRefused
from server.text.processes.call_queue import Lane
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
