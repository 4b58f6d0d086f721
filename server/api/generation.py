"""The choices of one request while they run: the engine's events in, pieces of text out.

Knows text and the engine's messages; knows neither HTTP nor what the endpoint's answer looks like.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from server.api.errors import from_engine
from server.engine.client import EngineClient, Stream
from server.engine.messages import Admitted, Explained, Failed, Submit, Tokens
from server.engine.report import RequestRecord
from server.text.detokenizer import Detokenizer
from server.text.output import OutputText
from server.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    """More text of one choice; with a finish_reason the last."""

    choice: int
    text: str
    finish_reason: str | None
    record: RequestRecord | None = None  # with the last piece, of requests that asked to be explained


@contextlib.asynccontextmanager
async def generate(
    client: EngineClient, tokenizer: Tokenizer, submits: Sequence[Submit], stop: Sequence[str]
) -> AsyncIterator[Generation]:
    """Runs one request for each choice; those that have not ended when the block is left are cancelled.

    Raises EngineLost when there is no engine.
    """
    outputs = [OutputText(Detokenizer(tokenizer, submit.prompt), stop) for submit in submits]
    async with client.stream(submits) as stream:
        yield Generation(stream, submits, outputs)


class Generation:
    """Made by `generate`. First `admission`, then `pieces`, both once."""

    def __init__(self, stream: Stream, submits: Sequence[Submit], outputs: Sequence[OutputText]) -> None:
        self._stream = stream
        self._index = {submit.request_id: index for index, submit in enumerate(submits)}
        self._explain = any(submit.explain for submit in submits)
        self._outputs = outputs
        self._last: dict[str, Piece] = {}  # by request: pieces that wait for their explanation
        self._early: Tokens | None = None  # read while waiting for the admission of other choices

    @property
    def completion_tokens(self) -> int:
        return sum(output.num_tokens for output in self._outputs)

    def fail(self, error: Exception) -> None:
        """Raises `error` from `admission` or `pieces`, after everything that the engine has sent."""
        self._stream.fail(error)

    async def admission(self) -> Admitted:
        """Waits until every choice is admitted, or one has a token: the others may have to wait for a place.

        Returns what was said of the choice admitted first. Raises ApiError, EngineLost.
        """
        waiting, first = set(self._index), None
        while waiting and self._early is None:
            match event := await anext(self._stream):
                case Admitted():
                    first = first or event
                    waiting.discard(event.request_id)
                case Tokens():
                    self._early = event
                case Failed():
                    raise from_engine(event)
        assert first is not None, "the engine sends Admitted before Tokens"
        return first

    async def pieces(self) -> AsyncIterator[Piece]:
        """Raises ApiError, EngineLost."""
        if self._early is not None and (piece := self._piece(self._early)):
            yield piece
        async for event in self._stream:
            match event:
                case Failed():
                    raise from_engine(event)
                case Explained(request_id, record):
                    yield self._last.pop(request_id)._replace(record=record)
                case Tokens():
                    if piece := self._piece(event):
                        yield piece

    def _piece(self, event: Tokens) -> Piece | None:
        """None while there is no text to show, or it is the last, and its explanation is to come."""
        index = self._index[event.request_id]
        output = self._outputs[index]
        text = output.push(event.tokens, event.finish_reason)
        if output.finish_reason is not None:
            self._stream.cancel(event.request_id, "stop")  # a stop string is nothing the engine knows of
        elif not text:
            return None
        piece = Piece(index, text, output.finish_reason)
        if self._explain and piece.finish_reason is not None:
            self._last[event.request_id] = piece
            return None
        return piece
