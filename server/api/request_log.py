"""One line of the log for every request for generation when it has ended, and for every other one that fails.

No line has anything of a body, but for the model's name: an ApiError says how its message is logged. With `log_prompts`
lines have all of it. Unexpected exceptions are answered here, so that they are logged once, and with the request's id.
Knows the answer's state (what errors.py and answers.py leave in the scope), and no endpoint.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.errors import ApiError, answer, as_api_error
from server.api.generation import Generation
from server.api.tracing import Tracing
from server.logs import fields

log = logging.getLogger(__name__)

POLLED = ("/ready",)  # a 503 of these is an answer
LONGEST_PATH = 200


class RequestLog:
    """Middleware, within RequestId."""

    def __init__(self, app: ASGIApp, log_prompts: bool, tracing: Tracing | None) -> None:
        self._app = app
        self._log_prompts = log_prompts
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began = time.monotonic()
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if "status" in scope["state"]:  # too late: uvicorn cuts the connection
                scope["state"]["error"] = as_api_error(error)
                raise
            await answer(Request(scope), error)(scope, receive, send)
        finally:
            self._tell(scope, began, time.monotonic())

    def _tell(self, scope: Scope, began: float, ended: float) -> None:
        state = scope["state"]
        error: ApiError | None = state.get("error")
        generation: Generation | None = state.get("generation")
        trace_id = None if self._tracing is None else self._tracing.record(scope, began, ended)
        level = level_of(scope, error)
        if (error is None and generation is None) or not log.isEnabledFor(level):
            return
        told = of_http(scope, began, ended) | (of_error(error, whole=self._log_prompts) if error else {})
        if generation is not None:
            told |= of_generation(generation, began) | {"outcome": outcome(generation, error)}
            told |= texts_of(generation) if self._log_prompts else {}
        told["trace_id"] = trace_id
        log.log(level, "%s", in_words(told), extra=fields(**told), exc_info=error.__cause__ if error else None)


def level_of(scope: Scope, error: ApiError | None) -> int:
    if error is None or error.status_code < 500:
        return logging.INFO
    if scope["path"] in POLLED:
        return logging.DEBUG
    return logging.ERROR if error.status_code == 500 else logging.WARNING


# ---------------------------------------------------------------- what there is to tell
def of_http(scope: Scope, began: float, ended: float) -> dict[str, Any]:
    """`status` is missing if the client had gone before there was an answer."""
    return {
        "request_id": scope["state"]["request_id"],
        "method": scope["method"],
        "path": scope["raw_path"][:LONGEST_PATH].decode("latin-1"),  # as it came: no line breaks
        "status": scope["state"].get("status"),
        "total_ms": milliseconds(ended - began),
    }


def of_error(error: ApiError, *, whole: bool) -> dict[str, Any]:
    return {"code": error.code, "error": error.message if whole else error.logged}


def of_generation(generation: Generation, began: float) -> dict[str, Any]:
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
    if admitted is not None:
        told |= {"strategy": admitted.instance, "reason": admitted.reason, "miss": admitted.miss}
        told |= {"cached_tokens": generation.cached_tokens, "queue_ms": milliseconds(admitted.queue_seconds)}
        if generation.first_token is not None:
            queued = generation.submitted + admitted.queue_seconds
            told["prefill_ms"] = milliseconds(generation.first_token - queued)
            told["first_token_ms"] = milliseconds(generation.first_token - began)
    return told


def outcome(generation: Generation, error: ApiError | None) -> str:
    """stop, length; cancelled if the client left. Of several choices each that there is."""
    if error is not None:
        return "error"
    reasons = {reason or "cancelled" for reason in generation.finish_reasons}
    return "cancelled" if "cancelled" in reasons else ",".join(sorted(reasons))


def texts_of(generation: Generation) -> dict[str, Any]:
    """Of prompts that came as token ids, those."""
    return {"prompts": [prompt.text or prompt.ids for prompt in generation.job.prompts], "texts": generation.texts}


def milliseconds(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 2)


def in_words(told: dict[str, Any]) -> str:
    """For people; JSON has it as its message, too."""
    parts = [f"{told['method']} {told['path']} {told['status'] or '-'}"]
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
