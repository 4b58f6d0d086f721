"""A program for test_ray_router.py: a deployment behind `KVRequestRouter`, called through a handle."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError

from server.cluster.calls import ReplicaLost
from server.cluster.serve.ray_calls import HandleCalls

TIMEOUT = 60.0  # seconds for an answer


@serve.deployment(
    num_replicas=2,
    request_router_config=RequestRouterConfig(
        request_router_class="server.cluster.serve.request_router:KVRequestRouter"
    ),
    ray_actor_options={"num_cpus": 0},
)
class Echo:
    """Returns the id of its replica."""

    async def name(self, hint: dict[str, Any], payload: bytes) -> str:
        return str(serve.get_replica_context().replica_id.unique_id)

    async def describe(self, hint: dict[str, Any], payload: bytes) -> bytes:
        return (await self.name(hint, payload)).encode()

    async def cancel_itself(self, hint: dict[str, Any], payload: bytes) -> bytes:
        raise asyncio.CancelledError

    async def get_pid(self, hint: dict[str, Any], payload: bytes) -> bytes:
        return str(os.getpid()).encode()


async def check_calls(calls: HandleCalls) -> None:
    """Check what calls raise when a replica cancels them, and that replicas that hang are listed."""
    ids = sorted(each.decode() for each in await calls.broadcast("describe", b"", TIMEOUT))
    assert sorted(await calls.list_replicas(TIMEOUT)) == ids
    for _ in range(2):
        try:
            async with asyncio.timeout(TIMEOUT):
                await calls.call("cancel_itself", ids[0], b"")
        except ReplicaLost:
            continue
        raise AssertionError("a call that its replica has cancelled has returned")
    pid = int(await calls.call("get_pid", ids[0], b""))
    os.kill(pid, signal.SIGSTOP)
    try:
        assert sorted(await calls.list_replicas(TIMEOUT)) == ids
        assert await calls.call("describe", ids[1], b"") == ids[1].encode()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert await calls.call("describe", ids[0], b"") == ids[0].encode()


def main() -> int:
    ray.init("local", include_dashboard=False, logging_level="warning", namespace="kvmux")
    handle = serve.run(Echo.bind(), name="echo", route_prefix=None)
    call = handle.options(method_name="name").remote
    id = call({}, b"").result(timeout_s=TIMEOUT)
    assert call({"replica": id}, b"").result(timeout_s=TIMEOUT) == id
    waiting = [call({"replica": "gone"}, b"") for _ in range(4)]
    for each in waiting:
        try:
            each.result(timeout_s=TIMEOUT)
        except DeploymentUnavailableError:
            continue
        raise AssertionError("a replica that there is not has answered")
    assert call({"replica": id}, b"").result(timeout_s=TIMEOUT) == id
    print("the router goes on")
    asyncio.run(check_calls(HandleCalls(handle)))
    print("calls end")
    serve.shutdown()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
