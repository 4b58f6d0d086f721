"""Describes an engine for operators: its properties, settings, caches, memory, and its state for metrics' gauges.

Knows no Prometheus.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from cache_strategies.errors import StrategyError
from cache_strategies.memory import Memory
from cache_strategies.registry import DeclaredInstance
from config.settings import SECRETS
from kernels.states import compute_slot_bytes
from server.engine.build import Engine
from server.engine.core import Core
from server.engine.device import device_memory
from server.engine.instance import Instance
from server.engine.instance_reports import count_tokens, read_blocks, read_budget, read_checkpoint_bytes, read_usage
from server.records import EngineInfo, EngineState, KVTokens, Role
from server.version import get_version

# Settings that are not shown; `model`, which may be a path, is shown as the model's name.
PRIVATE_SETTINGS = SECRETS | {"revision", "weights_cache", "rollouts_file", "board"}


def make_engine_info(engine: Engine, restarts: int = 0) -> EngineInfo:
    kernels = engine.kernels
    return EngineInfo(
        engine.instances,
        kernels.backend_by_op,
        kernels.faulty_ops,
        get_versions(),
        get_effective_settings(engine),
        restarts,
        [*engine.core.isolation.disabled],
    )


def get_versions() -> dict[str, str]:
    """Return the versions of the server, Python, torch and transformers."""
    return {
        "version": get_version(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # converts a TorchVersion, a subclass of str
        "transformers": metadata.version("transformers"),
    }


def get_effective_settings(engine: Engine) -> dict[str, Any]:
    """Return all settings except private ones, with the values that the server chose for `auto` and defaults."""
    settings, core = engine.settings, engine.core
    limits = core.scheduler.limits
    max_body_bytes, max_inflight_body_bytes = settings.compute_body_limits(limits.max_seq_len)
    return settings.model_dump(mode="json", exclude=set(PRIVATE_SETTINGS)) | {
        "model": engine.model_name,
        "model_name": ",".join((engine.model_name, *engine.aliases)),
        "model_impl": core.model.impl,
        "device": engine.device.name,
        "dtype": _format_dtype(core.model.dtype),
        "weights": next(iter(core.model.weight_formats)),
        "weight_formats": {name: usage._asdict() for name, usage in core.model.weight_formats.items()},
        "kernels": engine.kernels.backend,
        "threads": torch.get_num_threads(),
        "kv_memory_bytes": core.memory.planned_bytes,
        "max_seq_len": limits.max_seq_len,
        "max_body_bytes": max_body_bytes,
        "max_inflight_body_bytes": max_inflight_body_bytes,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
    }


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def summarize_engine(engine: Engine) -> dict[str, Any]:
    """Return the summary that is printed at start: model, device, memory, and each strategy's capacity and options.

    Options that have their defaults are left out.
    """
    core = engine.core
    return {
        **{
            name: get_effective_settings(engine)[name]
            for name in ("model", "device", "dtype", "weight_formats", "kv_memory_bytes", "max_seq_len")
        },
        "kernels": engine.kernels.description,
        "state_bytes": compute_slot_bytes(core.model.state_specs),
        "strategies": [
            {
                "name": d.name,
                "kind": d.kind,
                "options": d.options.model_dump(exclude_defaults=True),
                "capacity_tokens": compute_capacity_tokens(core.instances[d.name], engine.max_seq_len),
            }
            for d in engine.instances
        ],
    }


def compute_capacity_tokens(instance: Instance, max_seq_len: int) -> int | None:
    """Return the number of tokens that fit within an instance's limit at once, in sequences of max_seq_len.

    None if the instance has no regions, so that its capacity is not limited, or if it does not say how much.
    """
    try:
        sequence_bytes = instance.bytes_for(max_seq_len)
    except StrategyError:
        return None
    return instance.limit_bytes // sequence_bytes * max_seq_len if sequence_bytes else None


def describe_share(memory: Memory, name: str) -> dict[str, int]:
    """Return an instance's current floor and limit in bytes."""
    floor, limit = memory.get_share(name)
    return {"floor_bytes": floor, "limit_bytes": limit}


def describe_tokens(tokens: KVTokens) -> dict[str, int]:
    """Return the kept and dropped tokens of an instance's open sequences, or of one of them."""
    return {"kept_tokens": tokens.kept, "dropped_tokens": tokens.dropped}


def describe_memory(memory: Memory) -> dict[str, int]:
    """Return the bytes of the KV memory, which fall if the system lacks memory, and those that it has provided."""
    return {"bytes": memory.total_bytes, "warm_bytes": memory.space.warm_bytes}


def describe_instance(core: Core, declared: DeclaredInstance) -> dict[str, Any]:
    """Return the kind, the state, and the memory and the tokens of an instance."""
    name, instance = declared.name, core.instances[declared.name]
    return {
        "kind": declared.kind,
        "state": "quarantined" if name in core.isolation.quarantined else "ok",
        **describe_share(core.memory, name),
        "usage": read_usage(instance)._asdict(),
        **describe_tokens(count_tokens(instance)),
    }


def describe_caches(engine: Engine) -> list[dict[str, Any]]:
    """Return the instances for GET /v1/kv_cache, as docs/operations/administration.md describes them.

    The contract names the properties that a strategy guarantees, such as `exact`. An instance whose state is "disabled"
    has a reason only.
    """
    isolation = engine.core.isolation
    disabled = [
        {"name": name, "kind": engine.settings.strategies[name].kind, "state": "disabled", "reason": reason}
        for name, reason in isolation.disabled.items()
    ]
    return disabled + [
        {
            "name": d.name,
            **describe_instance(engine.core, d),
            "options": d.options.model_dump(),
            "contract": engine.core.instances[d.name].contract._asdict(),
            "budget_tokens": read_budget(engine.core.instances[d.name], engine.max_seq_len),
            "compactions": asdict(engine.core.compactions[d.name]),
        }
        for d in engine.instances
    ]


class ProcessMemory:
    """Reads the resident memory of the server's processes, in bytes; API workers report theirs."""

    def __init__(self) -> None:
        self._workers: dict[int, int] = {}  # resident bytes by API worker, as last reported
        self._engine = psutil.Process()
        self._supervisor = self._engine.parent() if multiprocessing.parent_process() else None

    def set_worker_memory(self, worker: int, memory: int) -> None:
        self._workers[worker] = memory

    def remove_worker(self, worker: int) -> None:
        self._workers.pop(worker, None)

    def read_resident_bytes(self) -> dict[Role, int]:
        supervisor = self._supervisor.memory_info().rss if self._supervisor else 0
        return {
            "engine": self._engine.memory_info().rss,
            "api": sum(self._workers.values()),
            "supervisor": supervisor,
        }


def read_engine_state(engine: Engine, processes: Mapping[Role, int]) -> EngineState:
    """Return the engine's state for metrics. Takes time proportional to the number of open sequences and blocks."""
    core, memory, scheduler = engine.core, engine.core.memory, engine.core.scheduler
    longest = scheduler.limits.max_seq_len
    budgets = {name: read_budget(instance, longest) for name, instance in core.instances.items()}
    return EngineState(
        running=Counter(request.instance.name for request in scheduler.running),
        waiting=scheduler.count_waiting(),
        usage={name: read_usage(instance) for name, instance in core.instances.items()},
        tokens={name: count_tokens(instance) for name, instance in core.instances.items()},
        budget_tokens={name: longest if budget is None else budget for name, budget in budgets.items()},
        blocks={name: read_blocks(instance) for name, instance in core.instances.items()},
        checkpoint_bytes={name: read_checkpoint_bytes(instance) for name, instance in core.instances.items()},
        floor_bytes={name: memory.get_share(name).floor for name in core.instances},
        quarantined=core.isolation.quarantined,
        pool_held=memory.held_bytes,
        pool_warm=max(0, memory.space.warm_bytes - memory.held_bytes),
        pool_cold=max(0, memory.total_bytes - max(memory.space.warm_bytes, memory.held_bytes)),
        device_memory=device_memory(engine.device),
        process_memory=processes,
        rollouts=engine.rollouts.states,
        shadow_pairs=engine.rollouts.pairs,
    )


# Model files up to this size are hashed whole. Of larger ones, the weights, parts of PART_BYTES are hashed, at equal
# distances from the first to the last: training moves all weights, and a start does not wait for 40 GB to be read.
SMALL_FILE_BYTES = 2**24
PARTS, PART_BYTES = 64, 2**16
# Settings that can change logits, if only in the last bits
NUMERIC_SETTINGS = (
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
)


def compute_fingerprint(engine: Engine) -> str:
    """Return OpenAI's system_fingerprint: "fp_" and 16 hexadecimal digits that change with model, code or settings."""
    settings = get_effective_settings(engine)
    configuration = [
        get_versions(),
        {name: settings[name] for name in NUMERIC_SETTINGS},
        dict(engine.kernels.backend_by_op),
    ]
    return f"fp_{compute_digest(configuration, engine.model_dir)}"


def compute_digest(configuration: Any, directory: Path) -> str:
    """Return 16 hexadecimal digits of a hash of `configuration` (encoded by msgspec) and the files of a model."""
    digest = hashlib.sha256(msgspec.json.encode(configuration, order="deterministic"))
    for file in _iter_model_files(directory):
        with contextlib.suppress(OSError):  # an unreadable file is skipped: the model was loaded without it
            content = _read_parts(file) if file.stat().st_size > SMALL_FILE_BYTES else file.read_bytes()
            digest.update(b"\0%b\0%b" % (file.name.encode(), content))
    return digest.hexdigest()[:16]


def _read_parts(file: Path) -> bytes:
    """Return the size of a large file and parts of it, of which the last one ends with the file."""
    size = file.stat().st_size
    parts = [str(size).encode()]
    with file.open("rb") as opened:
        for number in range(PARTS):
            opened.seek((size - PART_BYTES) * number // (PARTS - 1))
            parts.append(opened.read(PART_BYTES))
    return b"\0".join(parts)


def _iter_model_files(directory: Path) -> Iterator[Path]:
    """Yield the files of a model and its additional chat templates, sorted by name in each folder."""
    for folder in (directory, directory / "additional_chat_templates"):
        if folder.is_dir():
            yield from sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))


# ---------------------------------------------------------------- fields of descriptions
def drop_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def round_seconds(seconds: float | None) -> float | None:
    """Return seconds with one digit after the point; None stays None."""
    return None if seconds is None else round(seconds, 1)
