"""What an engine is and how it stands: in words, as JSON, as labels and gauges of metrics. Knows no Prometheus."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from cache_strategies.arena import Arena
from cache_strategies.base import Blocks, CacheUsage, KVCache
from cache_strategies.registry import Instance
from server.engine.build import Engine
from server.engine.core import Core
from server.engine.device import DeviceMemory, device_memory
from server.engine.records import Role, Wait
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
        "model_impl": core.model.impl,
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
        "max_num_batched_tokens": limits.max_num_batched_tokens,
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


@dataclass(frozen=True)
class State:
    """Bytes and counts, by instance where nothing else is said."""

    running: Mapping[str, int]  # requests
    waiting: Mapping[tuple[str, Wait], int]  # requests, by instance and what for
    usage: Mapping[str, CacheUsage]
    blocks: Mapping[str, Blocks]
    floors: Mapping[str, int]
    pool_free: int  # KV memory that no instance holds,
    pool_held: int  # that one does,
    pool_untouched: int  # and that the system has not given yet
    device: DeviceMemory
    processes: Mapping[Role, int]  # resident memory


class Processes:
    """The server's processes, and their resident memory in bytes."""

    def __init__(self) -> None:
        self._workers: dict[int, int] = {}  # as each reported last
        self._engine = psutil.Process()
        self._supervisor = self._engine.parent() if multiprocessing.parent_process() else None

    def told(self, worker: int, memory: int) -> None:
        self._workers[worker] = memory

    def gone(self, worker: int) -> None:
        self._workers.pop(worker, None)

    def resident(self) -> dict[Role, int]:
        supervisor = self._supervisor.memory_info().rss if self._supervisor else 0
        return {
            "engine": self._engine.memory_info().rss,
            "api": sum(self._workers.values()),
            "supervisor": supervisor,
        }


def state_of(core: Core, processes: Mapping[Role, int]) -> State:
    """Return the engine's state for metrics. Takes time proportional to the open sequences and blocks."""
    arena, scheduler = core.arena, core.scheduler
    return State(
        running=Counter(request.cache.name for request in scheduler.running),
        waiting=scheduler.waits(),
        usage={name: cache.usage() for name, cache in core.caches.items()},
        blocks={name: cache.blocks() for name, cache in core.caches.items()},
        floors={name: arena.share(name)[0] * arena.page_bytes for name in core.caches},
        pool_free=arena.free * arena.page_bytes,
        pool_held=(arena.usable - arena.free) * arena.page_bytes,
        pool_untouched=arena.untouched * arena.page_bytes,
        device=device_memory(core.model.device),
        processes=processes,
    )


SMALL = 2**24  # bytes of a file whose content counts; of larger ones, which are weights, only size and time of change
NUMERIC = (
    "model_impl",
    "device",
    "dtype",
    "weights",
    "kernels",
    "threads",
    "deterministic",
    "max_num_batched_tokens",
    "strategies",
    "rules",
    "default_strategy",
)  # settings that change the last bits of a logit, or more


def fingerprint(engine: Engine) -> str:
    """Return "fp_" and 16 hexadecimal digits."""
    settings = in_effect(engine)
    about = [versions(), {name: settings[name] for name in NUMERIC}, dict(engine.kernels.by_operation)]
    return f"fp_{digest(about, engine.directory)}"


def digest(about: Any, directory: Path) -> str:
    """Return a digest of what msgspec can encode, and of the files in a model's directory."""
    found = hashlib.sha256(msgspec.json.encode(about, order="deterministic"))
    for file in _files(directory):
        with contextlib.suppress(
            OSError
        ):  # a file that cannot be read is not a part of the model, which has been loaded
            now = file.stat()
            large = now.st_size > SMALL
            content = f"{now.st_size} {now.st_mtime_ns}".encode() if large else file.read_bytes()
            found.update(b"\0%b\0%b" % (file.name.encode(), content))
    return found.hexdigest()[:16]


def _files(directory: Path) -> Iterator[Path]:
    """Yield the files of a model, chat templates among them, in the same order each time."""
    for folder in (directory, directory / "additional_chat_templates"):
        if folder.is_dir():
            yield from sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
