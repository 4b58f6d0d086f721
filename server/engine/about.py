"""What does not change while an engine runs: the build, the settings as they came out, who computes which operation.

`auto` and defaults are filled in. Shown by /metrics and GET /v1/settings; keys, tokens and paths are left out.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from cache_strategies.registry import Instance
from server.engine.build import Engine
from server.engine.device import choose_weights
from server.version import version


@dataclass(frozen=True)
class About:
    """Of one engine."""

    instances: Sequence[Instance]
    backends: Mapping[str, str]  # by operation
    fallen_back: Sequence[str]  # operations that failed their check
    build: Mapping[str, str]
    settings: Mapping[str, Any]
    restarts: int  # of the engine, before this one


def about(engine: Engine, restarts: int = 0) -> About:
    return About(
        engine.instances,
        engine.kernels.by_operation,
        engine.kernels.faulty,
        build(),
        effective(engine),
        restarts,
    )


def build() -> dict[str, str]:
    """Versions of what runs."""
    return {
        "version": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }


def effective(engine: Engine) -> dict[str, Any]:
    """The settings that hold for the engine."""
    settings, core = engine.settings, engine.core
    limits, arena = core.scheduler.limits, core.arena
    return {
        "model": engine.name,
        "device": str(core.model.device),
        "dtype": _name(core.model.dtype),
        "weights": _name(choose_weights(settings, core.model.dtype)),
        "kernels": engine.kernels.backend,
        "threads": torch.get_num_threads(),
        "deterministic": settings.deterministic,
        "kv_memory_bytes": arena.pages * arena.page_bytes,
        "kv_page_bytes": arena.page_bytes,
        "kv_overcommit": limits.kv_overcommit,
        "max_seq_len": limits.max_seq_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_step_tokens": limits.max_step_tokens,
        "max_waiting": limits.max_waiting,
        "default_strategy": settings.default_strategy,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
