"""Stops work the moment its client is gone. Knows neither requests nor the engine."""

from __future__ import annotations

import asyncio

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send


class WhileConnected(Response):
    """A response made by an ASGI app that is cancelled when the client disconnects; its `finally` blocks clean up.

    The request's body must have been read. Exceptions of the app come through, so that they get their error response.
    """

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._app(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
