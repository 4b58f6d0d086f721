"""Puts an engine together from settings: model, KV memory, strategies, scheduler. Knows no socket.

What cannot work is found here, and raised as SettingsError with what to change.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from cache_strategies import registry
from cache_strategies.arena import Arena
from cache_strategies.base import Geometry, KVCache
from cache_strategies.registry import Instance
from config.errors import SettingsError
from config.settings import Settings
from config.sizes import parse_bytes
from kernels.backends import CheckedOps, load_ops
from kernels.device import Device, KernelsMissing
from kernels.ops import Ops
from kernels.selfcheck.check_memory import find_memory_fault
from kernels.tracing import TracedOps, Tracer
from server.engine.core import Core
from server.engine.device import (
    choose_device,
    choose_dtype,
    choose_max_batched_tokens,
    choose_threads,
    choose_weight_format,
    free_memory,
    limit_memory,
)
from server.engine.sampling.logprobs import MAX_STEP_LOGITS
from server.engine.scheduling.scheduler import Limits, Scheduler
from server.engine.scheduling.selection import Selector
from server.engine.warmup import run_dummy_step
from server.models.base import Model
from server.models.config import ModelInfo
from server.models.files.directory import locate
from server.models.load import load_model, read_model_info

DEFAULT_MAX_SEQ_LEN = 8192
# Of KV memory that are there when the engine is ready, and more where a sequence takes more
INITIAL_KV_BYTES = 64 << 20


@dataclass(frozen=True)
class Engine:
    """A core and the words that describe it."""

    settings: Settings
    model_name: str  # of the model
    aliases: Sequence[str]
    model_dir: Path  # of the model
    core: Core
    instances: Sequence[Instance]
    device: Device
    kernels: CheckedOps
    max_seq_len: int


def build_engine(settings: Settings, *, gradual: bool = False) -> Engine:
    """Load the model and allocate the KV memory; with `gradual`, what of it the first steps need. Raises SettingsError.

    The rest of a CPU's KV memory then comes in the background, and Core.step takes it.
    """
    directory = locate(settings.model, settings.revision, allow_symlinks=settings.allow_symlinks)
    facts = read_model_info(directory, settings.model_impl)
    instances = registry.resolve_instances(settings.strategies)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, facts.dtype, device)
    kernels = _load_kernels(settings, device, dtype)
    max_seq_len = _choose_max_seq_len(settings, facts)
    tracer = Tracer()
    ops = TracedOps(kernels.ops, tracer)
    if settings.deterministic:
        _check_batch_invariant(ops)
    limit_memory(device.tensors)
    model = _load_model(settings, directory, ops, dtype, device.tensors, max_seq_len)
    max_num_batched_tokens = choose_max_batched_tokens(settings.max_num_batched_tokens, device)
    geometry = Geometry(
        layers=model.layer_specs,
        kv_dtype=dtype,
        max_seats=settings.max_num_seqs,
        max_seq_len=max_seq_len,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    max_step_scores = max(1, MAX_STEP_LOGITS // model.info.vocab_size)
    if device.tensors.type != "cpu":
        _warm_up(settings, model, max_num_batched_tokens, max_step_scores)
    arena, caches = _allocate_kv_memory(settings, instances, geometry, ops, device.tensors, directory, gradual=gradual)
    _check_ops_in_kv_memory(caches, arena, geometry, kernels)
    limits = _make_limits(settings, geometry, arena, max_step_scores)
    selector = Selector(caches.keys(), settings.rules, settings.default_strategy)
    core = Core(model, caches, arena, Scheduler(limits), selector, ops, tracer)
    name, *aliases = settings.model_names
    return Engine(settings, name, aliases, directory, core, instances, device, kernels, max_seq_len)


def _allocate_kv_memory(
    settings: Settings,
    instances: Sequence[Instance],
    geometry: Geometry,
    ops: Ops,
    device: torch.device,
    directory: Path,
    *,
    gradual: bool,
) -> tuple[Arena, Mapping[str, KVCache]]:
    """Allocate the KV memory and make the caches that share it. Raises SettingsError."""
    page = registry.page_bytes(instances, geometry)
    pages = _choose_num_pages(settings, instances, geometry, page, device)
    with _translate_oom_errors(f"KV memory of {pages * page} bytes", "give a smaller kv_memory"):
        arena = Arena(pages, page, device, gradual=gradual and device.type == "cpu")
        caches = registry.build_caches(instances, geometry, arena, ops, str(directory))
        arena.touch(max(registry.compute_min_pages(instances, geometry), INITIAL_KV_BYTES // page))
        arena.touch_rest(partial(free_memory, device))
    return arena, caches


def _make_limits(settings: Settings, geometry: Geometry, arena: Arena, max_step_scores: int) -> Limits:
    return Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=geometry.max_num_batched_tokens,
        max_queued_requests=settings.max_queued_requests,
        max_seq_len=geometry.max_seq_len,
        kv_bytes=arena.num_usable_pages * arena.page_bytes,
        kv_overcommit=settings.kv_overcommit,
        max_logprob_tokens=max_step_scores,
        num_speculative_tokens=settings.num_speculative_tokens,
        max_speculative_tokens=settings.max_speculative_tokens,
        priority_aging=settings.priority_aging,
        max_priority_wait=settings.max_priority_wait,
    )


def _load_kernels(settings: Settings, device: Device, dtype: torch.dtype) -> CheckedOps:
    try:
        return load_ops(device, dtype, reference=settings.kernels == "reference")
    except KernelsMissing as error:
        raise SettingsError(f"device {device.name!r} is not usable here: {error}") from None


@contextmanager
def _translate_oom_errors(what: str, advice: str) -> Iterator[None]:
    """Turn what a device's allocator raises into a SettingsError. It has no type of its own on mps."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in ("out of memory", "Invalid buffer size")):
            raise
        raise SettingsError(f"{what} is too large for the device's memory: {advice}; torch says: {error}") from None
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise SettingsError(f"{what} is too large for this process: {advice}; the system says: {error}") from None


def _load_model(
    settings: Settings, directory: Path, ops: Ops, dtype: torch.dtype, device: torch.device, max_seq_len: int
) -> Model:
    """Load the model, and set the number of torch's threads for it."""
    if settings.threads is not None:  # for loading, too
        torch.set_num_threads(settings.threads)
    with _translate_oom_errors("the model", "take a smaller one, or keep its weights in a shorter format"):
        model = load_model(
            directory,
            settings.model_impl,
            ops=ops,
            dtype=dtype,
            weights=choose_weight_format(settings, dtype),
            device=device,
            positions=max_seq_len,
        )
    if settings.deterministic:
        _check_deterministic(model, ops)
    torch.set_num_threads(choose_threads(settings.threads, model.weight_bytes))
    return model


def _warm_up(settings: Settings, model: Model, max_num_batched_tokens: int, max_step_scores: int) -> None:
    """Run the largest step there can be: one of prompts, in which every other sequence draws a token."""
    rows = settings.max_num_seqs
    with _translate_oom_errors(
        f"a step of {max_num_batched_tokens} tokens", "lower max_num_batched_tokens or max_num_seqs"
    ):
        run_dummy_step(
            model,
            num_tokens=max_num_batched_tokens + rows,
            num_logits=min(max_step_scores, max_num_batched_tokens) + rows,
        )


def _check_ops_in_kv_memory(
    caches: Mapping[str, KVCache], arena: Arena, geometry: Geometry, kernels: CheckedOps
) -> None:
    """Raise SettingsError if the operations fail in the memory of a strategy, though they passed in a small one.

    Each is tried in the block that it would get first. On a device, where offsets are what is unproven, in the last one
    of all, too.
    """
    for name, cache in caches.items():
        if (store := cache.store) is None:
            continue
        first = arena.take(name, store.run)
        assert first is not None, "there is room for the longest sequence of each"
        blocks = [first] if store.device.type == "cpu" else [first, store.num_blocks - 1]
        faults = (find_memory_fault(kernels.ops, store, block, geometry.layers, geometry.kv_dtype) for block in blocks)
        fault = next(filter(None, faults), None)
        arena.release(name, first, store.run)
        if fault is not None:
            raise SettingsError(
                f"the kernels ({kernels.description}) fail in the KV memory of {name!r}: {fault}; lower max_seq_len or "
                "kv_memory, or have plain torch compute with kernels='reference'"
            )


def _check_batch_invariant(ops: Ops) -> None:
    """Raise SettingsError if a row's bits may depend on the rows beside it."""
    if not ops.batch_invariant_head_dim:
        raise SettingsError(
            "deterministic: only the C++ kernels on a CPU compute a row alike in every batch; see `kvmux doctor`"
        )


def _check_deterministic(model: Model, ops: Ops) -> None:
    """Raise SettingsError if a part of this model does not give a row the same bits in every batch."""
    if model.impl != "lean":
        raise SettingsError("deterministic: not for a model that transformers computes")
    most = ops.batch_invariant_head_dim
    if any(max(spec.head_dim, spec.v_head_dim) > most for spec in model.layer_specs):
        raise SettingsError(f"deterministic: only for heads of up to {most} numbers")


def _choose_max_seq_len(settings: Settings, facts: ModelInfo) -> int:
    wanted = settings.max_seq_len or min(facts.max_positions, DEFAULT_MAX_SEQ_LEN)
    if wanted > facts.max_positions:
        raise SettingsError(f"max_seq_len is {wanted}, but the model has {facts.max_positions} positions: lower it")
    return wanted


def _choose_num_pages(
    settings: Settings, instances: Sequence[Instance], geometry: Geometry, page: int, device: torch.device
) -> int:
    """Return the number of pages to take: as set, or a share of free memory, at most what max_num_seqs could fill."""
    least = registry.compute_min_pages(instances, geometry)
    if settings.kv_memory == "auto":
        most = settings.max_num_seqs * registry.sequence_pages(instances, geometry)
        pages = min(int(free_memory(device) * settings.kv_memory_share) // page, max(most, least))
        told = f"kv_memory=auto gives {pages * page} bytes ({settings.kv_memory_share:.0%} of what is free)"
    else:
        pages = parse_bytes(settings.kv_memory) // page
        told = f"kv_memory is {settings.kv_memory}"
        if (free := free_memory(device)) < pages * page:
            raise SettingsError(f"{told}, but only {free} bytes of memory are free: give less")
    if pages < least:
        raise SettingsError(
            f"{told}, too little for one sequence of max_seq_len={geometry.max_seq_len} under every strategy: "
            f"the least that suffices is kv_memory={least * page}; give that, or lower max_seq_len"
        )
    return pages
