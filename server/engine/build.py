"""Builds an engine from the settings: model, KV memory, strategies, scheduler. Knows no socket.

Settings that cannot work raise SettingsError here, with what to change.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from cache_strategies import registry
from cache_strategies.base import KVCache
from cache_strategies.block_table import centers_keys
from cache_strategies.memory import Memory, make_memory
from cache_strategies.registry import DeclaredInstance
from cache_strategies.spaces import find_space
from cache_strategies.types import Geometry
from config.errors import SettingsError
from config.settings import Settings
from config.sizes import parse_bytes
from kernels.backends import CheckedOps, KernelChoice, load_ops
from kernels.device import Device, KernelsMissing, get_device
from kernels.ops import Ops
from kernels.sampling import Sample
from kernels.selfcheck.check_memory import find_memory_fault
from kernels.tracing import Tracer, trace_ops
from kernels.types import LayerSpec
from server.engine.calls import CallObserver
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
from server.engine.extension import StepExtension
from server.engine.grammar.compiler import GrammarCompiler
from server.engine.grammar.waiting import WaitingForGrammars
from server.engine.isolation.fallbacks import Fallbacks
from server.engine.isolation.isolation import Isolation
from server.engine.key_means import add_key_means
from server.engine.model_runner import ModelRunner
from server.engine.request_factory import RequestFactory
from server.engine.rollout_link import RolloutLink
from server.engine.sampling.logprobs import MAX_STEP_LOGITS
from server.engine.sampling.sampler import Sampler
from server.engine.scheduling.scheduler import Limits, Scheduler
from server.engine.scheduling.selection import Selector
from server.engine.shadow.shadows import Shadows
from server.engine.warmup import run_dummy_step
from server.models.base import Model
from server.models.config import ModelInfo
from server.models.files.directory import locate
from server.models.load import load_model, read_model_info
from server.text.processes.sandbox import load_vocabulary

log = logging.getLogger(__name__)

DEFAULT_MAX_SEQ_LEN = 8192


@dataclass(frozen=True)
class Engine:
    """A built engine: its core, and the choices with which it was built."""

    settings: Settings
    model_name: str
    aliases: Sequence[str]  # other names of the model in the API
    model_dir: Path
    core: Core
    shadows: Shadows
    rollouts: RolloutLink
    grammars: GrammarCompiler
    instances: Sequence[DeclaredInstance]
    device: Device
    kernels: CheckedOps
    max_seq_len: int


def build_engine(
    settings: Settings,
    *,
    calls: CallObserver | None = None,
    disabled: Mapping[str, str] | None = None,
    extensions: Sequence[StepExtension] = (),
) -> Engine:
    """Load the model, plan the KV memory and return the engine. Raises SettingsError for settings that cannot work.

    `calls` sees every call of a strategy. Requests for the instances `disabled` are refused with the reasons given
    there. The hooks of `extensions` are called after those of the built-in ones.
    """
    directory = locate(settings.model, settings.revision, allow_symlinks=settings.allow_symlinks)
    info = read_model_info(directory, settings.model_impl)
    usable = {name: each for name, each in settings.strategies.items() if name not in (disabled or {})}
    instances = registry.resolve_instances(usable)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, info.dtype, device)
    limit_memory(device)
    kernels = _load_kernels(settings, device, dtype)
    max_seq_len = _choose_max_seq_len(settings, info)
    tracer = Tracer()
    ops = trace_ops(kernels.ops, tracer)
    if settings.deterministic:
        _check_batch_invariant(ops)
    model = _load_model(settings, directory, ops, dtype, device.tensors, max_seq_len)
    max_num_batched_tokens = choose_max_batched_tokens(settings.max_num_batched_tokens, device)
    geometry = Geometry(
        layers=_choose_layer_specs(model, instances, max_seq_len),
        kv_dtype=dtype,
        max_seats=settings.max_num_seqs,
        max_seq_len=max_seq_len,
        max_num_batched_tokens=max_num_batched_tokens,
        states=model.state_specs,
        end_ids=model.info.eos_ids,
    )
    max_step_scores = max(1, MAX_STEP_LOGITS // model.info.vocab_size)
    if device.tensors.type != "cpu":
        _warm_up(settings, model, max_num_batched_tokens, max_step_scores)
    memory, caches = _make_kv_memory(settings, instances, geometry, ops, device, directory)
    if settings.deterministic:
        _check_chunk_invariant(caches)
    with _translate_oom_errors(f"KV memory of {memory.total_bytes} bytes", "lower kv_memory"):
        # So that a request which was accepted never waits for the system
        longest = max(map(memory.get_longest_sequence, caches), default=0)
        memory.warm_up(memory.total_bytes if settings.kv_memory_at_start else longest)
    _check_ops_in_kv_memory(memory, caches, geometry, kernels)
    limits = _make_limits(settings, geometry, memory.total_bytes, max_step_scores)
    selector = Selector(settings.strategies.keys(), settings.rules, settings.default_strategy)
    by_name = {instance.name: instance for instance in instances}
    isolation = Isolation(
        caches,
        lambda name: registry.build_cache(by_name[name], geometry, memory, ops, str(directory)),
        timeout=settings.strategy_timeout,
        calls=calls,
        disabled=disabled,
        fallbacks=settings.fallbacks,
    )
    rollouts = RolloutLink(selector, isolation.usable)
    grammars = GrammarCompiler(partial(load_vocabulary, directory), model.info.vocab_size)
    scheduler = Scheduler(limits)
    shadows, fallbacks = Shadows(scheduler), Fallbacks(isolation, scheduler)
    scheduler.release_spare = shadows.release_one
    factory = RequestFactory(selector, isolation, fallbacks, memory, scheduler, model.info.eos_ids, grammars)
    host_sample = ops.sample if device.tensors.type == "cpu" else _load_host_sample(settings, dtype)
    runner = ModelRunner(model, Sampler(model.info.eos_ids, ops.sample, host_sample), tracer)
    waiting = WaitingForGrammars(grammars, limits.max_queued_requests)
    core = Core(runner, isolation, memory, scheduler, factory, [waiting, shadows, fallbacks, rollouts, *extensions])
    name, *aliases = settings.model_names
    return Engine(
        settings, name, aliases, directory, core, shadows, rollouts, grammars, instances, device, kernels, max_seq_len
    )


def _choose_layer_specs(model: Model, instances: Sequence[DeclaredInstance], max_seq_len: int) -> Sequence[LayerSpec]:
    """Return the model's layers, with the means of their keys if an instance subtracts them."""
    if any(centers_keys(each.options) for each in instances):
        return add_key_means(model, max_seq_len)
    return model.layer_specs


def _make_kv_memory(
    settings: Settings,
    instances: Sequence[DeclaredInstance],
    geometry: Geometry,
    ops: Ops,
    device: Device,
    directory: Path,
) -> tuple[Memory, Mapping[str, KVCache]]:
    """Make the KV memory and the caches that share it. Raises SettingsError if memory does not suffice."""
    total = _choose_kv_bytes(settings, instances, geometry, device)
    with _translate_oom_errors(f"KV memory of {total} bytes", "lower kv_memory"):
        memory = make_memory(total, device.tensors, partial(free_memory, device))
        return memory, registry.build_caches(instances, geometry, memory, ops, str(directory))


def _make_limits(settings: Settings, geometry: Geometry, kv_bytes: int, max_step_scores: int) -> Limits:
    return Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=geometry.max_num_batched_tokens,
        max_queued_requests=settings.max_queued_requests,
        max_seq_len=geometry.max_seq_len,
        kv_bytes=kv_bytes,
        kv_overcommit=settings.kv_overcommit,
        max_logprob_tokens=max_step_scores,
        num_speculative_tokens=settings.num_speculative_tokens,
        max_speculative_tokens=settings.max_speculative_tokens,
        priority_aging=settings.priority_aging,
        max_priority_wait=settings.max_priority_wait,
    )


def _load_kernels(settings: Settings, device: Device, dtype: torch.dtype) -> CheckedOps:
    try:
        return load_ops(device, dtype, kernels=settings.kernels)
    except KernelsMissing as error:
        wanted = "" if settings.kernels == "auto" else f" with kernels {settings.kernels!r}"
        raise SettingsError(f"device {device.name!r} is not usable here{wanted}: {error}") from None


def _load_host_sample(settings: Settings, dtype: torch.dtype) -> Sample:
    """Return `Ops.sample` of the CPU, which an accelerator's rows are drawn with; only this operation is checked."""
    kernels: KernelChoice = "reference" if settings.kernels == "reference" else "auto"
    return load_ops(get_device("cpu"), dtype, kernels=kernels, names=frozenset({"sample"})).ops.sample


@contextmanager
def _translate_oom_errors(what: str, advice: str) -> Iterator[None]:
    """Turn an out-of-memory error of the `with` block into a SettingsError: `what` is too large; `advice` is appended.

    On mps out-of-memory errors are plain RuntimeErrors, so they are recognised by their message.
    """
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
    """Load the model, and set the number of torch's CPU threads by its size. Raises SettingsError if loading fails."""
    if settings.threads is not None:  # applies to loading, too
        torch.set_num_threads(settings.threads)
    with _translate_oom_errors("the model", "use a smaller model, or a smaller format of its weights (--weights)"):
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
    """Run the largest possible step: max_num_batched_tokens prompt tokens and one token for each of max_num_seqs rows.

    The device's allocator keeps that step's memory, so that the KV memory cannot take it. Raises SettingsError if the
    device's memory does not suffice.
    """
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
    memory: Memory, caches: Mapping[str, KVCache], geometry: Geometry, kernels: CheckedOps
) -> None:
    """Raise SettingsError if operations that passed their check in a small memory fail in the KV memory of a strategy.

    The operations are tried in the first blocks that a strategy would allocate and, on accelerators, also in the last
    blocks of a region, as large offsets are only tested there.
    """
    for name, store in ((name, store) for name, cache in caches.items() for store in dict.fromkeys(cache.stores)):
        region = next((each for each in memory.list_regions(name) if each.memory is store.memory), None)
        if region is None:
            continue  # memory of the strategy's own
        run, count = store.pages_per_block, store.blocks_per_token
        first = region.allocate(count)
        assert first is not None, "the memory fits the longest sequence of each strategy"
        last = [store.num_blocks - 1 - run * i for i in range(count)]
        tried = [first] if store.device.type == "cpu" else [first, last]
        faults = (find_memory_fault(kernels.ops, store, blocks, geometry.layers, geometry.kv_dtype) for blocks in tried)
        fault = next(filter(None, faults), None)
        region.release(first)
        if fault is not None:
            raise SettingsError(
                f"the kernels ({kernels.description}) fail in the KV memory of {name!r}: {fault}; lower max_seq_len or "
                "kv_memory, or use plain torch with kernels='reference'"
            )


def _check_batch_invariant(ops: Ops) -> None:
    """Raise SettingsError if the kernels' result for a row may depend on the other rows of the batch."""
    if not ops.batch_invariant_head_dim:
        raise SettingsError(
            "deterministic: only the C++ CPU kernels give a row the same result in every batch; see `kvmux doctor`"
        )


def _check_chunk_invariant(caches: Mapping[str, KVCache]) -> None:
    """Raise SettingsError if a strategy's result may depend on how tokens were split into rows."""
    if varying := [name for name, cache in caches.items() if not cache.contract.chunk_invariant]:
        raise SettingsError(
            f"deterministic: a text under {', '.join(varying)} depends on how its prompt is cut into rows; remove "
            "these strategies from the settings"
        )


def _check_deterministic(model: Model, ops: Ops) -> None:
    """Raise SettingsError if the model's result for a row may depend on the other rows of the batch."""
    if model.impl != "lean":
        raise SettingsError("deterministic: not supported for models that transformers computes (model_impl)")
    max_head_dim = ops.batch_invariant_head_dim
    if any(max(spec.head_dim, spec.v_head_dim) > max_head_dim for spec in model.layer_specs):
        raise SettingsError(f"deterministic: only supported for head dimensions of up to {max_head_dim}")


def _choose_max_seq_len(settings: Settings, info: ModelInfo) -> int:
    max_seq_len = settings.max_seq_len or min(info.max_positions, DEFAULT_MAX_SEQ_LEN)
    if max_seq_len > info.max_positions:
        raise SettingsError(f"max_seq_len is {max_seq_len}, but the model has {info.max_positions} positions: lower it")
    return max_seq_len


def _choose_kv_bytes(
    settings: Settings, instances: Sequence[DeclaredInstance], geometry: Geometry, device: Device
) -> int:
    """Return the bytes of the KV memory. Raises SettingsError if they do not suffice.

    kv_memory=auto takes a share of the free memory, and at most what max_num_seqs sequences can fill.
    """
    round_block = find_space(device.tensors).round_block
    least = registry.compute_least_bytes(instances, geometry, round_block)
    if settings.kv_memory == "auto":
        most = settings.max_num_seqs * registry.compute_sequence_bytes(instances, geometry, round_block)
        total = min(int(free_memory(device) * settings.kv_memory_share), max(most, least))
        choice = f"kv_memory=auto gives {total} bytes ({settings.kv_memory_share:.0%} of the free memory)"
    else:
        total = parse_bytes(settings.kv_memory)
        choice = f"kv_memory is {settings.kv_memory}"
        if (free := free_memory(device)) < total:
            raise SettingsError(f"{choice}, but only {free} bytes of memory are free: lower it")
    if total < least:
        raise SettingsError(
            f"{choice}, too little for one sequence of max_seq_len={geometry.max_seq_len} under every strategy: "
            f"the minimum is kv_memory={least}; set that, or lower max_seq_len"
        )
    return total
