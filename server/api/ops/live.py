"""The live state of the server over HTTP: once, or as server-sent events twice a second, with what has changed.

Beside it: the cached prefixes, the contents of a block, and the end of a request.

The events of a stream are `snapshot` (the whole state), `change` (what differs from the event before) and
`unavailable` (the engine is away; a snapshot follows). `AuthenticationMiddleware` in server/api/http/middleware.py
decides which clients may watch. Knows of the state's contents only how regions are (server/engine/live/blocks.py).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from server.api.http.errors import ApiError, make_error_responses
from server.api.http.middleware import LIVE_PATH
from server.api.ops.monitoring import CachedAnswer
from server.engine.ipc.client import EngineClient, EngineLost, EngineRefused
from server.engine.ipc.messages import Abort, Answer, DescribeBlock

INTERVAL = 0.5  # seconds between two events of a stream
MAX_STREAMS = 32  # maximum number of open streams in this process: each takes some milliseconds twice a second
CHUNK = 64  # number of cells that are compared, and sent, together
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}  # nginx would collect events

Number = Annotated[int, Path(ge=0, lt=2**63)]  # in a path; larger ones cannot be sent to the engine
State = Mapping[str, Any]  # the engine's answer to the question "live"


class LiveState:
    """The engine's live state, decoded once for all streams of this process, until the server stops.

    While `is_draining` returns True, a stream ends after each event, as another process will serve its client.
    """

    def __init__(self, client: EngineClient, is_draining: Callable[[], bool] = lambda: False) -> None:
        self.stopping = asyncio.Event()
        self._is_draining = is_draining
        self.num_streams = 0
        self._answers = CachedAnswer(client, "live")
        self._decoded: tuple[Answer, State] | None = None

    async def get_answer(self) -> Answer:
        """Return the latest state in JSON. Raises EngineLost without an engine, EngineRefused if it refuses."""
        return await self._answers.get()

    async def get(self) -> State:
        """Return the latest state. Raises as `get_answer`."""
        answer = await self._answers.get()
        if self._decoded is None or self._decoded[0] is not answer:
            self._decoded = answer, msgspec.json.decode(answer.body)
        return self._decoded[1]

    def stop(self) -> None:
        """End all streams, so that the server need not wait for them."""
        self.stopping.set()

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield events until the server stops or drains."""
        last: State | None = None
        while not self.stopping.is_set():
            event, last = await self._make_event(last)
            yield event
            try:
                await asyncio.wait_for(self.stopping.wait(), INTERVAL)
            except TimeoutError:
                if self._is_draining():
                    return

    async def _make_event(self, last: State | None) -> tuple[bytes, State | None]:
        """Return (the next event after the state `last`, the state that it leads to: None if there is none)."""
        try:
            state = await self.get()
        except EngineLost as error:
            return encode_event("unavailable", {"message": str(error), "retry_after": error.retry_after}), None
        except EngineRefused as error:
            return encode_event("unavailable", {"message": error.error.message, "retry_after": 0.0}), None
        if last is None:
            return encode_event("snapshot", state), state
        return encode_event("change", make_change(last, state)), state


class LiveEvents(StreamingResponse):
    """The events of the live state, to one of at most MAX_STREAMS clients. Raises ApiError 429 for more."""

    def __init__(self, live: LiveState) -> None:
        super().__init__(live.stream(), media_type="text/event-stream", headers=HEADERS)
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Counted here, as a stream whose client has gone is called, but may never be read
        if self._live.num_streams >= MAX_STREAMS:
            message = f"{MAX_STREAMS} clients watch the live state already; close one of them, or poll {LIVE_PATH}"
            raise ApiError(429, message, code="too_many_streams")
        self._live.num_streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._live.num_streams -= 1


def router(live: LiveState, client: EngineClient) -> APIRouter:
    routes = APIRouter(prefix=LIVE_PATH, tags=["live"], responses=make_error_responses(401, 403, 404, 429, 503))
    prefixes = CachedAnswer(client, "prefixes")

    @routes.get("")
    async def show() -> Response:
        """Show what the server holds and does at this moment: memory, blocks, instances and requests."""
        return Response((await live.get_answer()).body, media_type="application/json", headers=HEADERS)

    @routes.get("/events", response_class=StreamingResponse)
    async def watch() -> StreamingResponse:
        """Send the state as server-sent events: a `snapshot`, and a `change` every half second."""
        return LiveEvents(live)

    @routes.get("/prefixes")
    async def list_prefixes() -> Response:
        """List the cached prefixes of each instance that can list them, as trees; up to two seconds old."""
        return Response((await prefixes.get()).body, media_type="application/json", headers=HEADERS)

    @routes.get("/blocks/{instance}/{region}/{block}")
    async def describe_block(instance: str, region: Number, block: Number) -> Response:
        """Describe a block of the KV memory, by the numbers of its region and of itself."""
        command = DescribeBlock(instance, region, block)
        return Response(await client.query(command), media_type="application/json", headers=HEADERS)

    @routes.delete("/requests/{worker}/{request_id}")
    async def end_request(worker: Number, request_id: str) -> Response:
        """End a request, by its key in the live state; its client gets an error. Needs the admin token."""
        return Response(await client.query(Abort(worker, request_id)), media_type="application/json")

    return routes


# ---------------------------------------------------------------- events
def encode_event(name: str, data: Any) -> bytes:
    """Return a server-sent event: its name, and data in JSON, which has no line breaks."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


def make_change(old: State, new: State) -> dict[str, Any]:
    """Return what has to be changed in `old` to get `new`.

    `patch` is a JSON merge patch (RFC 7396), which has the states of blocks only of regions that are new or have fewer
    cells. `states` has those of other regions, as runs of cells that differ or are new: the number of the first, and
    their states in base64.
    """
    regions, runs = dict(new["regions"]), {}
    for name, region in new["regions"].items():
        old_region = old["regions"].get(name, region)
        before, after = (base64.b64decode(each["states"]) for each in (old_region, region))
        if len(before) <= len(after):
            regions[name] = {**region, "states": old_region["states"]}
            if found := find_runs(before, after):
                runs[name] = [[first, base64.b64encode(after[first:end]).decode()] for first, end in found]
    return {"patch": make_merge_patch(old, {**new, "regions": regions}), "states": runs}


def find_runs(old: bytes, new: bytes) -> list[tuple[int, int]]:
    """Return the runs [first, end) of whole chunks in which bytes differ from those before, or are new."""
    runs: list[tuple[int, int]] = []
    for first in range(0, len(new), CHUNK):
        end = min(first + CHUNK, len(new))
        if old[first:end] == new[first:end]:
            continue
        if runs and runs[-1][1] == first:
            first, _ = runs.pop()
        runs.append((first, end))
    return runs


def make_merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON merge patch (RFC 7396) that turns `old` into `new`, which must have no null."""
    patch: dict[str, Any] = dict.fromkeys(key for key in old if key not in new)
    for key, value in new.items():
        before = old.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            if nested := make_merge_patch(before, value):
                patch[key] = nested
        elif before != value:
            patch[key] = value
    return patch
