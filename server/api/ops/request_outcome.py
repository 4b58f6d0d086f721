"""What is known of a request when it is over, once for all who tell of it. Knows neither the log nor spans."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from starlette.datastructures import Headers

from server.api.http.errors import ApiError
from server.api.openai.generation import Generation

CLIENT_CLOSED_REQUEST = 499  # before there was a response; nginx's number
PHASES = ("queue", "prefill", "decode")


@dataclass(frozen=True)
class Ended:
    """Times are monotonic seconds. Of several choices they are of the one that was admitted first."""

    request_id: str
    method: str
    path: str  # as it came, without the query
    route: str  # the path, unquoted
    headers: Headers
    status: int
    error: ApiError | None
    generation: Generation[Any] | None  # of requests that got as far as the engine
    start_time: float
    end_time: float

    @property
    def total_seconds(self) -> float:
        return self.end_time - self.start_time

    @property
    def first_token_seconds(self) -> float | None:
        first = self._first_token_time
        return None if first is None else first - self.start_time

    @property
    def phases(self) -> dict[str, tuple[float, float]]:
        """From when to when, each from where the one before ended; as far as it came, the last to the end."""
        if self.generation is None:
            return {}
        known = (self.generation.submit_time, self._admission_time, self._first_token_time)
        moments = [moment for moment in known if moment is not None] + [self.end_time]
        return dict(zip(PHASES, pairwise(moments), strict=False))

    @property
    def finish_reasons(self) -> list[str]:
        """Of each choice: stop, length; cancelled if it had not ended."""
        reasons = [] if self.generation is None else self.generation.finish_reasons
        return [reason or "cancelled" for reason in reasons]

    @property
    def _first_token_time(self) -> float | None:
        return None if self.generation is None else self.generation.first_token_time

    @property
    def _admission_time(self) -> float | None:
        """From the engine's word how long it waited, but not after what followed."""
        if self.generation is None or (admitted := self.generation.first_admitted) is None:
            return None
        return min(self.generation.submit_time + admitted.queue_seconds, self._first_token_time or self.end_time)
