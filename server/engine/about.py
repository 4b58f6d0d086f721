"""Describes an engine: in words for whoever starts it, as JSON and labels for whoever looks at it while it runs.

Settings are shown as they came out, `auto` and defaults filled in; keys, tokens and paths are left out.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from cache_strategies.base import KVCache
from cache_strategies.registry import Instance
from kernels.arena import Arena
from server.engine.build import Engine
from server.models.decoder import Decoder
from server.version import version

PRIVATE = frozenset(
    {"api_keys", "key_limits", "admin_token", "metrics_key", "otlp_traces_endpoint", "revision", "weights_cache"}
)  # and `model` may be a path


@dataclass(frozen=True)
class About:
    """The properties of an engine that do not change while it runs."""

    instances: Sequence[Instance]
    backends: Mapping[str, str]  # by operation
    fallen_back: Sequence[str]  # operations that failed their check
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    restarts: int  # engines before this one


def about(engine: Engine, restarts: int = 0) -> About:
    kernels = engine.kernels
    return About(engine.instances, kernels.by_operation, kernels.faulty, versions(), in_effect(engine), restarts)


def versions() -> dict[str, str]:
    """Return the versions of the server and of what it runs on."""
    return {
        "version": version(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # which is a class of its own
        "transformers": metadata.version("transformers"),
    }


def in_effect(engine: Engine) -> dict[str, Any]:
    """Return all settings but private ones, with the values that the server chose where they were left to it."""
    settings, core = engine.settings, engine.core
    limits, arena = core.scheduler.limits, core.arena
    max_body_bytes, max_inflight_body_bytes = settings.body_bytes(limits.max_seq_len)
    return settings.model_dump(mode="json", exclude=set(PRIVATE)) | {
        "model": engine.name,
        "model_name": ",".join((engine.name, *engine.aliases)),
        "model_impl": "lean" if isinstance(core.model, Decoder) else "transformers",
        "device": engine.device.name,
        "dtype": _name(core.model.dtype),
        "weights": core.model.weight_format,
        "kernels": engine.kernels.backend,
        "threads": torch.get_num_threads(),
        "kv_memory_bytes": arena.pages * arena.page_bytes,
        "kv_page_bytes": arena.page_bytes,
        "max_seq_len": limits.max_seq_len,
        "max_body_bytes": max_body_bytes,
        "max_inflight_body_bytes": max_inflight_body_bytes,
        "max_step_tokens": limits.max_step_tokens,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def summary(engine: Engine) -> dict[str, Any]:
    """Return what is shown at start: where the engine runs, and how many tokens fit under each strategy."""
    core = engine.core
    return {
        **{name: in_effect(engine)[name] for name in ("model", "device", "dtype", "kv_memory_bytes", "max_seq_len")},
        "kernels": engine.kernels.words,
        "strategies": [
            {
                "name": d.name,
                "kind": d.kind,
                "options": d.options.model_dump(),
                "capacity_tokens": capacity_tokens(core.caches[d.name], engine.max_seq_len),
            }
            for d in engine.instances
        ],
    }


def capacity_tokens(cache: KVCache, max_seq_len: int) -> int | None:
    """Return the tokens that an instance can serve at once, in sequences of max_seq_len, within its limit.

    None: as much as one likes, it takes nothing from the arena.
    """
    need = cache.bytes_for(max_seq_len)
    return cache.limit_bytes // need * max_seq_len if need else None


def shares(arena: Arena, name: str) -> dict[str, int]:
    """Return an instance's current floor and limit in bytes."""
    floor, limit = arena.share(name)
    return {"floor_bytes": floor * arena.page_bytes, "limit_bytes": limit * arena.page_bytes}


def memory_of(arena: Arena) -> dict[str, int]:
    """Return the bytes of KV memory in all, and those that are usable now; less in all, if memory has run out."""
    return {"bytes": arena.total * arena.page_bytes, "usable_bytes": arena.usable * arena.page_bytes}


def describe_caches(engine: Engine) -> list[dict[str, Any]]:
    """Return the instances as /v1/kv_cache shows them: options in effect, contract and usage."""
    return [
        {
            "name": d.name,
            "kind": d.kind,
            "options": d.options.model_dump(),
            **shares(engine.core.arena, d.name),
            "contract": engine.core.caches[d.name].contract._asdict(),
            "usage": engine.core.caches[d.name].usage()._asdict(),
        }
        for d in engine.instances
    ]
