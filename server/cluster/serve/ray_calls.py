"""Calls replicas through a handle of Ray Serve, and turns Ray's errors into ReplicaLost."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectRefStreamEndOfStreamError,
    RayActorError,
)
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError

from server.cluster.calls import LOST_MESSAGE, ReplicaLost

log = logging.getLogger(__name__)

# An id that no replica has: the router refuses a request for it, and names those that there are
NO_REPLICA = ""
LOST = (RayActorError, ActorDiedError, ActorUnavailableError, DeploymentUnavailableError)


class HandleCalls:
    """Implements `ReplicaCalls` by a deployment handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True, method_name="generate")

    async def generate(self, hint: dict[str, Any], payload: bytes) -> AsyncGenerator[bytes, None]:
        with _translate_errors():
            response = _run_outside_of_request(self._streaming.remote, hint, payload)
            try:
                async for item in response:
                    yield item
            except RequestCancelledError:
                raise asyncio.CancelledError from None
            finally:
                response.cancel()  # does nothing after the end

    async def call(self, method: str, replica: str, payload: bytes) -> bytes:
        with _translate_errors():
            remote = self._handle.options(method_name=method).remote
            result: bytes = await _run_outside_of_request(remote, {"replica": replica}, payload)
            return result

    async def broadcast(self, method: str, payload: bytes, timeout: float) -> Sequence[bytes]:
        with _translate_errors():
            response = _run_outside_of_request(self._handle.broadcast, method, {}, payload)
            results = await response.results_async(timeout_s=timeout, return_exceptions=True)
        failed = [each for each in results if isinstance(each, BaseException)]
        for error in failed:
            log.log(logging.INFO if isinstance(error, LOST) else logging.WARNING, "a replica did not answer: %r", error)
        good = [each for each in results if not isinstance(each, BaseException)]
        if not good:
            raise ReplicaLost("no replica has answered; try again")
        return good

    async def list_replicas(self, timeout: float) -> Sequence[str]:
        hint: dict[str, Any] = {"replica": NO_REPLICA}
        remote = self._handle.options(method_name="describe").remote
        with contextlib.suppress(DeploymentUnavailableError):
            async with asyncio.timeout(timeout):
                await _run_outside_of_request(remote, hint, b"")
        return list(hint.get("replicas", ()))


def _run_outside_of_request(function: Callable[..., Any], *args: object) -> Any:
    """Call a function of Ray in an empty context.

    In the context of an HTTP request, all calls would have the same internal id, by which the router tells its pending
    requests apart: of several calls at a time, some would wait for ever.
    """
    return contextvars.Context().run(function, *args)


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise ReplicaLost for errors of Ray that mean that a replica, or every replica, is gone or full."""
    try:
        yield
    except LOST as error:
        if not isinstance(error, DeploymentUnavailableError):  # as long as there is none at all
            log.info("a replica was lost: %s", type(error).__name__)
        raise ReplicaLost(LOST_MESSAGE) from None
    except BackPressureError:
        raise ReplicaLost("all replicas are full; try again") from None
    except ObjectRefStreamEndOfStreamError:  # what the caller of a method sees that was cancelled in the replica
        log.info("a replica has cancelled a call")
        raise ReplicaLost(LOST_MESSAGE) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        log.info("a call was cancelled by Ray")
        raise ReplicaLost(LOST_MESSAGE) from None
