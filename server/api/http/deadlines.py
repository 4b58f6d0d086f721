"""How long a request may wait for its place, and take altogether. Knows seconds; neither requests nor the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from server.api.http.errors import ApiError


@dataclass(frozen=True)
class Deadlines:
    """Seconds; None: no limit."""

    queue: float | None = None
    request: float | None = None

    @contextlib.asynccontextmanager
    async def of_queue(self) -> AsyncIterator[None]:
        """Raises ApiError when the block takes longer."""
        try:
            async with asyncio.timeout(self.queue):
                yield
        except TimeoutError:
            message = f"the request did not get its place within {self.queue:g} seconds; try again later"
            raise ApiError(503, message, code="queue_timeout") from None

    @contextlib.contextmanager
    def of_request(self, fail: Callable[[Exception], None]) -> Iterator[None]:
        """When the block takes longer, calls `fail` with an ApiError: an answer that has begun needs an end."""
        if self.request is None:
            yield
            return
        message = f"the request took longer than {self.request:g} seconds; ask for fewer tokens"
        timer = asyncio.get_running_loop().call_later(
            self.request, fail, ApiError(504, message, code="request_timeout")
        )
        try:
            yield
        finally:
            timer.cancel()
