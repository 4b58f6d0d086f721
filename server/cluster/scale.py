"""The number of replicas, and the division of a machine among those that share it. Knows nothing of Ray."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from config.errors import SettingsError
from config.settings import Settings
from server.processes.cgroups import count_processors


@dataclass(frozen=True)
class Scale:
    """The number of replicas, and what Ray reserves for each of them."""

    replicas: int = 1  # with max_replicas: the least number
    max_replicas: int | None = None  # greatest number, up to which Ray scales by load; None: it does not scale
    replicas_per_node: int | None = None  # greatest number on a machine; None: spread evenly over the machines
    cpus: float = 0.0  # for each replica; 0: it may start on any machine
    gpus: float = 0.0  # for each replica

    def __post_init__(self) -> None:
        for name in ("replicas", "replicas_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{name} is {value}, and has to be at least 1")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise SettingsError(f"max_replicas is {self.max_replicas}, less than replicas, {self.replicas}: raise it")

    def count_per_node(self, num_nodes: int) -> int:
        """Return the greatest number of replicas on one of `num_nodes` machines."""
        return self.replicas_per_node or math.ceil((self.max_replicas or self.replicas) / max(1, num_nodes))


def divide_machine(settings: Settings, per_node: int, gpus: float = 0.0) -> Settings:
    """Return the settings of one of `per_node` replicas on this machine: its part of the memory and of the threads.

    A size or a number in the settings is for each replica and stays as it is. `gpus` is the number of GPUs of a
    replica: those with a whole GPU do not share its memory.
    """
    num_sharing = per_node if not gpus else max(1, min(per_node, math.floor(1 / gpus)))
    changes: dict[str, Any] = {}
    if settings.kv_memory == "auto":
        changes["kv_memory_share"] = settings.kv_memory_share / num_sharing
    if settings.threads is None and per_node > 1:
        changes["threads"] = max(1, count_processors() // per_node)
    return settings.model_copy(update=changes)
