"""Measures the time of a decode step by the length of the context and by the number of sequences, for each strategy.

Beside each time is the shortest one that the memory's read bandwidth allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from config.errors import SettingsError
from config.settings import load_settings
from kernels.tracing import OpCounter
from server.engine.build import Engine, build_engine
from server.evaluation.command import select_strategies
from server.profiling.machine import measure_bandwidth
from server.profiling.steps import average_fastest
from tools.bench.decoding.steps import WARMUP_STEPS, decode_step, fill_at_random, opened_seats
from tools.bench.growth.plot import GrowthPoint
from tools.bench.table.long_contexts import SETTINGS_FILE

CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16_384, 32_000)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)
SEQUENCE_CONTEXT = 512  # tokens of each of several sequences
STEPS = 15
MIN_SEQ_LEN = 1344  # what the window of `streaming` needs
MIRRORED = "mirrored"  # a kind that the settings of the benchmark's server leave out


def measure_by_context(settings: Mapping[str, Any], largest: int) -> Iterator[GrowthPoint]:
    """Yield the milliseconds of a step of one sequence under each strategy, by context length up to `largest`.

    The bound is the time of the first strategy at the shortest length, and that to read the further bytes.
    """
    engine = _build_engine(settings, max(CONTEXTS) + WARMUP_STEPS + STEPS + 1, 1)
    longest = min(largest, engine.max_seq_len - WARMUP_STEPS - STEPS - 1)
    base = bandwidth = None
    for length in (length for length in CONTEXTS if length <= longest):
        for name in engine.core.caches:
            measured = _measure_step(engine, name, 1, length)
            if measured is None:
                continue
            seconds, size = measured
            base = base or measured
            bandwidth = bandwidth or measure_bandwidth(size, torch.get_num_threads())
            bound = base[0] + (size - base[1]) / bandwidth
            yield GrowthPoint("context", length, "ms a step", 1e3 * seconds, 1e3 * bound, name)


def measure_by_sequences(settings: Mapping[str, Any], largest: int) -> Iterator[GrowthPoint]:
    """Yield tokens per second under each strategy by the number of sequences up to `largest`.

    The bound is that of reading all weights, and the keys and values of all sequences, once a step.
    """
    engine = _build_engine(settings, SEQUENCE_CONTEXT + WARMUP_STEPS + STEPS + 1, max(SEQUENCES))
    bandwidth = None
    for count in (count for count in SEQUENCES if count <= largest):
        for name in engine.core.caches:
            measured = _measure_step(engine, name, count, SEQUENCE_CONTEXT)
            if measured is None:
                continue
            seconds, size = measured
            bandwidth = bandwidth or measure_bandwidth(size, torch.get_num_threads())
            yield GrowthPoint("sequences", count, "tokens/s", count / seconds, count * bandwidth / size, name)


def _build_engine(settings: Mapping[str, Any], length: int, sequences: int) -> Engine:
    """Build an engine for `sequences` texts of `length` tokens, or of the model's context if that is shorter.

    It has the strategies that `make bench` compares, `mirrored`, and no limits for each. Raises SettingsError.
    """
    loaded = load_settings(SETTINGS_FILE, {**settings, "max_seq_len": None, "max_num_seqs": sequences})
    names = [*loaded.strategies, MIRRORED]
    names.sort(key=lambda name: name != loaded.default_strategy)
    strategies = {
        name: each.model_copy(update={"floor": "0%", "limit": "100%"})
        for name, each in select_strategies(loaded, names).items()
    }
    whole = loaded.model_copy(update={"strategies": strategies, "rules": []})
    try:
        engine = build_engine(whole.model_copy(update={"max_seq_len": max(length, MIN_SEQ_LEN)}))
    except SettingsError as error:
        if "positions" not in str(error):
            raise
        engine = build_engine(whole)
    fill_at_random(next(iter(engine.core.caches.values())))
    return engine


def _measure_step(engine: Engine, name: str, sequences: int, context: int) -> tuple[float, int] | None:
    """Return the seconds of a decode step, and the bytes that it must read and write; None if memory is too small.

    The seconds are the mean of the fastest fifth of the steps, which other processes disturbed least.
    """
    core = engine.core
    prompts = torch.randint(core.model.info.vocab_size, (sequences, context)).tolist()
    try:
        with opened_seats(core.caches[name], prompts) as seats:

            def step() -> float:
                return decode_step(core.model, core.caches[name], seats).total

            for _ in range(WARMUP_STEPS):
                step()
            with core.tracer.record(OpCounter()) as counter:
                step()
            taken = average_fastest([{"step": step()} for _ in range(STEPS)])
    except SettingsError:
        return None
    return taken["step"], sum(counter.bytes.values())
