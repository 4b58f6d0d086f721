"""Builds the application for Ray Serve: API processes (ingress), and replicas, each with an engine.

`kvmux ray up` calls `build_application` with settings; a Serve config file names `application`, whose arguments are
those of `Scale` and the settings. Imports Ray: server/cli/ray_flags.py checks that it is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from config.settings import Settings, load_settings
from server.cluster.scale import Scale
from server.cluster.serve.ingress import HEALTH_CHECK_PERIOD, ClusterIngress
from server.cluster.serve.replica import EngineReplica

APPLICATION_NAME, INGRESS_NAME, REPLICA_NAME = "kvmux", "ingress", "engine"
ROUTER = "server.cluster.serve.request_router:KVRequestRouter"
SCALING_POLICY = "server.cluster.autoscaling:autoscaling_policy"
STATISTICS_PERIOD = 1.0  # seconds between two reports of a replica to the routers
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)  # each request has a line in kvmux' own log
CONTROL_CALLS = 64  # calls of a replica beside its requests: cancels, queries, statistics
INGRESS_CALLS = 4096  # most requests of an API process at a time
DRAIN_MARGIN = 5.0  # seconds beyond `drain_seconds` until Ray kills a replica that drains


def application(arguments: Mapping[str, Any]) -> Any:
    """Return the application for `serve deploy`: `arguments` has fields of Scale, settings, and `config`, a file.

    Raises SettingsError for an argument that is neither.
    """
    given = dict(arguments)
    scale = Scale(**{each.name: given.pop(each.name) for each in fields(Scale) if each.name in given})
    file = given.pop("config", None)
    return build_application(load_settings(file, given, are_flags=False), scale)


def build_application(settings: Settings, scale: Scale) -> Any:
    """Return the application, with `settings.workers` API processes.

    The settings' host and port are those of Ray's proxy, and are not used here.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else [None]
    per_node = scale.count_per_node(len(nodes))
    settings = settings.model_copy(update={"rollouts_file": "off"})  # several replicas would write one file
    replicas = serve.deployment(EngineReplica, name=REPLICA_NAME).options(
        **_get_replica_options(settings, scale, per_node)
    )
    ingress = serve.deployment(serve.ingress()(ClusterIngress), name=INGRESS_NAME).options(
        num_replicas=settings.workers,
        max_ongoing_requests=INGRESS_CALLS,
        ray_actor_options={"num_cpus": 0},
        logging_config=QUIET,
        health_check_period_s=HEALTH_CHECK_PERIOD,
        max_surge_percent=100,  # new ones start before old ones end, so that clients never wait for an API process
        **_get_draining(settings),
    )
    return ingress.bind(settings, replicas.bind(settings, per_node, scale.gpus))


def _get_replica_options(settings: Settings, scale: Scale, per_node: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_ongoing_requests": settings.max_num_seqs + settings.max_queued_requests + CONTROL_CALLS,
        "max_replicas_per_node": scale.replicas_per_node,
        "ray_actor_options": {"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        "request_router_config": RequestRouterConfig(
            request_router_class=ROUTER, request_routing_stats_period_s=STATISTICS_PERIOD
        ),
        "logging_config": QUIET,
        **_get_draining(settings),
    }
    if scale.max_replicas is None:
        return options | {"num_replicas": scale.replicas}
    options["autoscaling_config"] = AutoscalingConfig(
        min_replicas=scale.replicas,
        max_replicas=scale.max_replicas,
        policy=AutoscalingPolicy(policy_function=SCALING_POLICY),
    )
    return options


def _get_draining(settings: Settings) -> dict[str, Any]:
    """Return the options by which Ray lets started requests end before it stops a replica."""
    return {
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": settings.drain_seconds + DRAIN_MARGIN,
    }
