"""Ends work early: at its deadline, and the moment its client is gone. Knows neither requests nor the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.http.errors import ApiError


@dataclass(frozen=True)
class Deadlines:
    """Seconds; None: no limit."""

    queue_timeout: float | None = None
    request_timeout: float | None = None

    @contextlib.asynccontextmanager
    async def limit_queue_time(self) -> AsyncIterator[None]:
        """Raise ApiError when the block takes longer."""
        try:
            async with asyncio.timeout(self.queue_timeout):
                yield
        except TimeoutError:
            message = f"the request did not get its place within {self.queue_timeout:g} seconds; try again later"
            raise ApiError(503, message, code="queue_timeout") from None

    @contextlib.contextmanager
    def limit_request_time(self, fail: Callable[[Exception], None]) -> Iterator[None]:
        """When the block takes longer, calls `fail` with an ApiError: an answer that has begun needs an end."""
        if self.request_timeout is None:
            yield
            return
        message = f"the request took longer than {self.request_timeout:g} seconds; ask for fewer tokens"
        timer = asyncio.get_running_loop().call_later(
            self.request_timeout, fail, ApiError(504, message, code="request_timeout")
        )
        try:
            yield
        finally:
            timer.cancel()


class WhileConnected(Response):
    """A response made by an ASGI app that is cancelled when the client disconnects; its `finally` blocks clean up.

    The request's body must have been read. Exceptions of the app come through, so that they get their error response.
    """

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._app(scope, receive, send))
        gone = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
