"""A program for test_ray_router.py: a deployment behind `KVRequestRouter`, called through a handle."""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError

TIMEOUT = 60.0  # seconds for an answer


@serve.deployment(
    num_replicas=2,
    request_router_config=RequestRouterConfig(request_router_class="server.cluster.router:KVRequestRouter"),
    ray_actor_options={"num_cpus": 0},
)
class Echo:
    """Returns the id of its replica."""

    async def name(self, hint: dict[str, Any], payload: bytes) -> str:
        return str(serve.get_replica_context().replica_id.unique_id)


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
    serve.shutdown()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
