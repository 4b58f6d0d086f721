"""Decides how many replicas Ray should run, by the work that waits and the KV memory in use.

Ray calls `autoscaling_policy` in its controller, with what replicas report by `record_autoscaling_stats`
(serve/replica.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# Replicas are added above these averages of all replicas
TARGET_TOKENS = 4096.0  # prompt tokens that wait
TARGET_KV_USAGE = 0.8  # share of the KV memory that running requests use
# Replicas are removed only if the averages of those that remain would stay below this share of the targets
REMOVE_BELOW = 0.6
STATISTICS = ("queued_tokens", "kv_usage")


def choose_num_replicas(current: int, queued_tokens: Sequence[float], kv_usage: Sequence[float]) -> int:
    """Return the number of replicas that suits the load; the sequences have a number for each replica."""
    # The number of replicas whose averages would be at the targets
    load = max(sum(queued_tokens) / TARGET_TOKENS, sum(kv_usage) / TARGET_KV_USAGE)
    if load > current:
        return math.ceil(load)
    return min(current, max(1, math.ceil(load / REMOVE_BELOW)))


def autoscaling_policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas for an AutoscalingContext of Ray, and no state for the next call."""
    # Means over the last seconds (look_back_period_s), by replica
    metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics
    queued_tokens, kv_usage = (list(metrics.get(name, {}).values()) for name in STATISTICS)
    wanted = choose_num_replicas(context.current_num_replicas, queued_tokens, kv_usage)
    return max(context.capacity_adjusted_min_replicas, min(wanted, context.capacity_adjusted_max_replicas)), {}
