"""Computes answers to queries: an error becomes an Answer, and whoever answers goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable

from server.engine.ipc.messages import Answer, Failed, QueryPayload
from server.engine.scheduling.request import RequestError

log = logging.getLogger(__name__)


def compute_answer(query_id: int, query: QueryPayload, created_at: float, compute: Callable[[], bytes]) -> Answer:
    """Return the answer whose body `compute` returns, or one with the error that it raises; log an unexpected one.

    `created_at`: the time now, as in Answer.
    """
    try:
        return Answer(query_id, compute(), created_at=created_at)
    except RequestError as error:
        return Answer(query_id, b"", error.to_message(), created_at)
    except Exception:
        log.exception("failed to answer %s", query if isinstance(query, str) else type(query).__name__)
        failed = Failed("", 500, "the engine failed to answer; the server's log has the cause")
        return Answer(query_id, b"", failed, created_at)
