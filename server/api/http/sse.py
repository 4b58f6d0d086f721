"""Server-sent events: `data: {json}` and an empty line for each, `data: [DONE]` at the end. Knows no endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Scope, Send

from server.api.http.errors import to_api_error

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect events
}


async def send_events(scope: Scope, send: Send, headers: Mapping[str, str], events: AsyncIterator[list[bytes]]) -> None:
    """Send a whole response; events that come together go into one part of it.

    An error of `events` comes after the status was sent: it is one more event.
    """
    raw = MutableHeaders({**HEADERS, **headers}).raw
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    try:
        async for together in events:
            # A step of the engine wakes all streams. Each writes its event before any is sent: code that stays in the
            # CPU's caches takes half the time.
            await asyncio.sleep(0)
            await send(_make_body_message(together))
    except Exception as error:
        told = scope["state"]["error"] = to_api_error(error)  # for the log, too
        await send(_make_body_message([told.encode()]))
    await send(_make_body_message([b"[DONE]"]))
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _make_body_message(events: Sequence[bytes]) -> Message:
    return {"type": "http.response.body", "body": b"data: %b\n\n" % b"\n\ndata: ".join(events), "more_body": True}
