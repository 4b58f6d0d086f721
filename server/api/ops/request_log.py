"""One line of the log for every request for generation when it has ended, and for every other one that fails.

No line has anything of a body, but for the model's name: an ApiError says how its message is logged. Where prompts
are wanted, lines have all of it. Knows what is known of a request at its end, and no endpoint.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from starlette.datastructures import Headers

from server.api.http.errors import ApiError
from server.api.openai.generation import Generation
from server.logs import fields

log = logging.getLogger(__name__)

POLLED_ROUTES = ("/ready",)  # a 503 of these is an answer
MAX_PATH_LENGTH = 200
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


# ---------------------------------------------------------------- the line
def log_request(ended: Ended, trace_id: str | None, *, with_prompts: bool) -> None:
    """Log a line about a request that failed or generated something, if the level is on."""
    error, generation = ended.error, ended.generation
    level = get_log_level(ended)
    if (error is None and generation is None) or not log.isEnabledFor(level):
        return
    told = make_http_fields(ended) | (make_error_fields(error, whole=with_prompts) if error else {})
    if generation is not None:
        told |= make_generation_fields(ended, generation) | {"outcome": get_outcome(ended)}
        told |= make_text_fields(generation) if with_prompts else {}
    told["trace_id"] = trace_id
    log.log(level, "%s", format_message(told), extra=fields(**told), exc_info=error.__cause__ if error else None)


def get_log_level(ended: Ended) -> int:
    if ended.error is None or ended.error.status_code < 500:
        return logging.INFO
    if ended.route in POLLED_ROUTES:
        return logging.DEBUG
    return logging.ERROR if ended.error.status_code == 500 else logging.WARNING


# ---------------------------------------------------------------- what there is to tell
def make_http_fields(ended: Ended) -> dict[str, Any]:
    return {
        "request_id": ended.request_id,
        "method": ended.method,
        "path": ended.path[:MAX_PATH_LENGTH],
        "status": ended.status,
        "total_ms": to_milliseconds(ended.total_seconds),
    }


def make_error_fields(error: ApiError, *, whole: bool) -> dict[str, Any]:
    return {"code": error.code, "error": error.message if whole else error.log_message}


def make_generation_fields(ended: Ended, generation: Generation[Any]) -> dict[str, Any]:
    """Of several choices: strategy, reason, miss and times of the one that was admitted first, tokens of all."""
    admitted, job = generation.first_admitted, generation.job
    told = {
        "completion_id": job.id,
        "model": job.model,
        "choices": len(job.submits),
        "prompt_tokens": generation.prompt_tokens,
        "generated_tokens": generation.completion_tokens,
        "preemptions": generation.preemptions,
    }
    if generation.drafted_tokens:
        told |= {"drafted_tokens": generation.drafted_tokens, "accepted_tokens": generation.accepted_tokens}
    if admitted is not None:
        told |= {"strategy": admitted.instance, "reason": admitted.reason, "miss": admitted.miss}
        told |= {"cached_tokens": generation.cached_tokens, "queue_ms": to_milliseconds(admitted.queue_seconds)}
    if ended.first_token_seconds is not None:
        seated, first = ended.phases["prefill"]
        told |= {
            "prefill_ms": to_milliseconds(first - seated),
            "first_token_ms": to_milliseconds(ended.first_token_seconds),
        }
    return told


def get_outcome(ended: Ended) -> str:
    """stop, length; cancelled if the client left. Of several choices each that there is."""
    if ended.error is not None:
        return "error"
    reasons = set(ended.finish_reasons)
    return "cancelled" if "cancelled" in reasons else ",".join(sorted(reasons))


def make_text_fields(generation: Generation[Any]) -> dict[str, Any]:
    """Of prompts that came as token ids, those."""
    return {"prompts": [prompt.text or prompt.ids for prompt in generation.job.prompts], "texts": generation.texts}


def to_milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 2)


def format_message(told: dict[str, Any]) -> str:
    """For people; JSON has it as its message, too."""
    parts = [f"{told['method']} {told['path']} {told['status']}"]
    if "outcome" in told:
        cached = f" ({told['cached_tokens']} cached)" if told.get("cached_tokens") else ""
        parts.append(f"{told['outcome']}, {told.get('strategy', 'not admitted')}")
        parts.append(f"{told['prompt_tokens']}{cached} + {told['generated_tokens']} tokens")
    if "first_token_ms" in told:
        parts.append(f"first after {told['first_token_ms']:.0f} ms")
    parts.append(f"{told['total_ms']:.0f} ms")
    if "error" in told:
        parts.append(f"{told['error']}")
    parts += [f"{name} {told[name]!r}" for name in ("prompts", "texts") if name in told]
    return ", ".join(parts) + f" [{told['request_id']}]"
