"""A line of the log for every request for generation that has ended, and for every other request that failed.

A line has nothing of a body but the model's name: if an ApiError's message quotes the client, its `log_message` is
logged instead. With the setting log_prompts, lines have prompts, texts and whole messages. Knows ended requests, but
no endpoint.
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

POLLED_ROUTES = ("/ready",)  # routes whose 503 is an ordinary response, logged at DEBUG only
MAX_PATH_LENGTH = 200
CLIENT_CLOSED_REQUEST = 499  # status, as in nginx, of a request whose client left before the response
PHASES = ("queue", "prefill", "decode")


@dataclass(frozen=True)
class EndedRequest:
    """What is known of a request when it has ended.

    Times are monotonic seconds; if the request has several choices, times of the choice that was admitted first.
    """

    request_id: str
    method: str
    path: str  # as the client sent it, without the query
    route: str  # the path, unquoted
    headers: Headers
    status: int
    error: ApiError | None
    generation: Generation[Any] | None  # None if the engine did not get the request
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
        """Return (start, end) of each phase that was reached (queue, prefill, decode); the last ends at `end_time`."""
        if self.generation is None:
            return {}
        known = (self.generation.submit_time, self._admission_time, self._first_token_time)
        moments = [moment for moment in known if moment is not None] + [self.end_time]
        return dict(zip(PHASES, pairwise(moments), strict=False))

    @property
    def finish_reasons(self) -> list[str]:
        """Return each choice's finish reason: "stop", "length", or "cancelled" if it had not ended."""
        reasons = [] if self.generation is None else self.generation.finish_reasons
        return [reason or "cancelled" for reason in reasons]

    @property
    def _first_token_time(self) -> float | None:
        return None if self.generation is None else self.generation.first_token_time

    @property
    def _admission_time(self) -> float | None:
        """Return when the engine admitted the request: submit time plus queue time, but not after the first token."""
        if self.generation is None or (admitted := self.generation.first_admitted) is None:
            return None
        return min(self.generation.submit_time + admitted.queue_seconds, self._first_token_time or self.end_time)


# ---------------------------------------------------------------- the line
def log_request(ended: EndedRequest, trace_id: str | None, *, with_prompts: bool) -> None:
    """Log a line about a request that failed or generated something, if the log level is enabled."""
    error, generation = ended.error, ended.generation
    level = get_log_level(ended)
    if (error is None and generation is None) or not log.isEnabledFor(level):
        return
    line_fields = make_http_fields(ended) | (make_error_fields(error, whole=with_prompts) if error else {})
    if generation is not None:
        line_fields |= make_generation_fields(ended, generation) | {"outcome": get_outcome(ended)}
        line_fields |= make_text_fields(generation) if with_prompts else {}
    line_fields["trace_id"] = trace_id
    log.log(
        level,
        "%s",
        format_message(line_fields),
        extra=fields(**line_fields),
        exc_info=error.__cause__ if error else None,
    )


def get_log_level(ended: EndedRequest) -> int:
    if ended.error is None or ended.error.status_code < 500:
        return logging.INFO
    if ended.route in POLLED_ROUTES:
        return logging.DEBUG
    return logging.ERROR if ended.error.status_code == 500 else logging.WARNING


# ---------------------------------------------------------------- its fields
def make_http_fields(ended: EndedRequest) -> dict[str, Any]:
    return {
        "request_id": ended.request_id,
        "method": ended.method,
        "path": ended.path[:MAX_PATH_LENGTH],
        "status": ended.status,
        "total_ms": to_milliseconds(ended.total_seconds),
    }


def make_error_fields(error: ApiError, *, whole: bool) -> dict[str, Any]:
    return {"code": error.code, "error": error.message if whole else error.log_message}


def make_generation_fields(ended: EndedRequest, generation: Generation[Any]) -> dict[str, Any]:
    """Return a generation's log fields: strategy and times of the choice admitted first, token counts of all."""
    admitted, job = generation.first_admitted, generation.job
    line_fields = {
        "completion_id": job.id,
        "model": job.model,
        "choices": len(job.submits),
        "prompt_tokens": generation.prompt_tokens,
        "generated_tokens": generation.completion_tokens,
        "preemptions": generation.preemptions,
    }
    if generation.drafted_tokens:
        line_fields |= {"drafted_tokens": generation.drafted_tokens, "accepted_tokens": generation.accepted_tokens}
    if admitted is not None:
        line_fields |= {"strategy": admitted.instance, "reason": admitted.reason, "miss": admitted.miss}
        line_fields |= {"cached_tokens": generation.cached_tokens, "queue_ms": to_milliseconds(admitted.queue_seconds)}
    if ended.first_token_seconds is not None:
        seated, first = ended.phases["prefill"]
        line_fields |= {
            "prefill_ms": to_milliseconds(first - seated),
            "first_token_ms": to_milliseconds(ended.first_token_seconds),
        }
    return line_fields


def get_outcome(ended: EndedRequest) -> str:
    """Return "error" for a failed request, "cancelled" if a choice had not ended, else the choices' finish reasons."""
    if ended.error is not None:
        return "error"
    reasons = set(ended.finish_reasons)
    return "cancelled" if "cancelled" in reasons else ",".join(sorted(reasons))


def make_text_fields(generation: Generation[Any]) -> dict[str, Any]:
    """Return log fields with the generated texts and the prompts, each as text if that is known, else as token ids."""
    return {"prompts": [prompt.text or prompt.ids for prompt in generation.job.prompts], "texts": generation.texts}


def to_milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 2)


def format_message(line_fields: dict[str, Any]) -> str:
    """Return the fields of a log line as one line of text, which is also the message of a line in JSON."""
    parts = [f"{line_fields['method']} {line_fields['path']} {line_fields['status']}"]
    if "outcome" in line_fields:
        cached = f" ({line_fields['cached_tokens']} cached)" if line_fields.get("cached_tokens") else ""
        parts.append(f"{line_fields['outcome']}, {line_fields.get('strategy', 'not admitted')}")
        parts.append(f"{line_fields['prompt_tokens']}{cached} + {line_fields['generated_tokens']} tokens")
    if "first_token_ms" in line_fields:
        parts.append(f"first after {line_fields['first_token_ms']:.0f} ms")
    parts.append(f"{line_fields['total_ms']:.0f} ms")
    if "error" in line_fields:
        parts.append(f"{line_fields['error']}")
    parts += [f"{name} {line_fields[name]!r}" for name in ("prompts", "texts") if name in line_fields]
    return ", ".join(parts) + f" [{line_fields['request_id']}]"
