"""Applies the routing policy of server/cluster/router.py in Ray Serve.

Each process that calls replicas has a router of this class. Ray pickles the class by value for these processes, which
import the policy.
"""

from __future__ import annotations

from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from server.cluster.router import Hint, RoutingPolicy


class KVRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Routes the calls of a deployment handle by a `RoutingPolicy`.

    The first argument of a call is a dict with the fields of `Hint`. It gets an item "routed", which explains the
    choice, and, if the call is for a replica that there is not, an item "replicas", the ids of those that there are.
    Ray collects the statistics of replicas by their method `record_routing_stats`.
    """

    def initialize_state(self, **_: Any) -> None:
        self._policy = RoutingPolicy()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_id = {each.replica_id.unique_id: each for each in candidate_replicas}
        if not by_id:
            return []
        self._policy.update({id.unique_id: each.routing_stats for id, each in self.curr_replicas.items()})
        argument = pending_request.args[0] if pending_request is not None and pending_request.args else None
        decision = self._policy.choose(Hint.from_dict(argument), [*by_id])
        if isinstance(argument, dict):
            argument["routed"] = decision.explain()
        if pending_request is not None:
            # Without this Ray would call again at once, without end, while the chosen replicas take nothing
            pending_request.routing_context.should_backoff = True
            if not decision.replicas:
                self._refuse(pending_request, [*by_id])
                return [[each] for each in by_id.values()]  # Ray looks at the future before it calls one
        return [[by_id[id]] for id in decision.replicas]

    def _refuse(self, pending_request: PendingRequest, ids: list[str]) -> None:
        """Fail a request for a replica that is not one of `ids`, for which Ray would wait without end."""
        pending_request.args[0]["replicas"] = ids
        if not pending_request.future.done():
            pending_request.future.set_exception(DeploymentUnavailableError(self._deployment_id))
            self._remove_pending_request_from_indices(pending_request)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        hint = Hint.from_dict(pending_request.args[0]) if pending_request.args else None
        if hint is not None:
            request_id = pending_request.metadata.internal_request_id
            self._policy.record_sent(request_id, hint, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._policy.record_ended(internal_request_id, replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._policy.forget(replica_id.unique_id)
