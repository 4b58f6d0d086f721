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

from server.processes.framing import WireError, framed
from server.text.errors import TextLimitError, TextRefused
from server.text.processes.call_queue import Lane
from server.text.processes.messages import REFUSALS, Answer, Call, EncodeChat, Encoded, Refused, Start
from server.text.processes.text_process import ProcessFailed, TextProcess, Why
from server.text.tokenizer import TokenizerBase

log = logging.getLogger(__name__)

SHORT_CALL = 2**16  # bytes; about 30 ms of work
SHORT_TIME = 1.0  # seconds after which a call is not short
SHORT_MEMORY = 2**28  # bytes
LOAD_MEMORY = 2**32  # bytes; the largest tokenizers take about one of the four GiB while they are read
MARGIN = 5.0  # seconds after which a process ends itself that should have been killed
MOST_CALLS, MOST_BYTES = 1024, 2**26  # that wait in a lane
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
        where = str(directory.resolve())
        self._limits = limits
        short = CallLimits(min(SHORT_TIME, limits.seconds), min(SHORT_MEMORY, limits.memory))
        first = TextProcess(_start(where, short, with_vocabulary=True))
        try:
            super().__init__(first.vocabulary())
        except BaseException:
            first.end_now()
            raise
        self._short = Lane(partial(_process, where, short), short.seconds, MOST_CALLS, MOST_BYTES, process=first)
        self._long = Lane(partial(_process, where, limits), limits.seconds, MOST_CALLS, MOST_BYTES, linger=linger)

    async def __aenter__(self) -> SandboxedTokenizer:
        await self._short.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(self._short.close(), self._long.close())

    async def answer(self, call: Call) -> Encoded:
        """Return the result of a call. Raises TextRefused, TextUnavailable."""
        try:
            answer = await self._answered(request_of(call))
        except ProcessFailed as error:
            log.warning("a call to the model's tokenizer or chat template was ended: %s", error.why)
            raise self._limit_error(call, error.why) from None
        if isinstance(answer, Refused):
            raise REFUSALS[answer.kind](answer.message)
        return answer

    async def _answered(self, request: bytes) -> Answer:
        if len(request) <= SHORT_CALL:
            try:
                return await self._short.ask(request)
            except ProcessFailed as error:
                log.info("a short call to the model's tokenizer or chat template was ended: %s", error.why)
        return await self._long.ask(request)

    def _limit_error(self, call: Call, why: Why) -> TextLimitError:
        chat = isinstance(call, EncodeChat)
        program, what = ("chat template or tokenizer", "these messages") if chat else ("tokenizer", "this text")
        match why:
            case "time":
                message = f"the model's {program} took more than {self._limits.seconds:g} s for {what}; send less"
                return TextLimitError(message, "text_timeout")
            case "memory":
                most = self._limits.memory / 2**20
                message = f"the model's {program} needed more than {most:,.0f} MiB of memory for {what}; send less"
                return TextLimitError(message, "text_memory")
        return TextLimitError(f"the model's {program} ended its process over {what}", "text_crash")


def request_of(call: Call) -> bytes:
    """Return a call as bytes. Raises TextRefused."""
    try:
        return framed(pickle.dumps(call))
    except (RecursionError, WireError):
        raise TextRefused("what was sent is nested too deeply, or is too long; send less") from None


def _start(directory: str, limits: CallLimits, *, with_vocabulary: bool = False) -> Start:
    return Start(directory, limits.seconds + MARGIN, limits.memory, LOAD_MEMORY, with_vocabulary)


def _process(directory: str, limits: CallLimits) -> TextProcess:
    return TextProcess(_start(directory, limits))
