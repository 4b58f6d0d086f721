"""Measures the time of a decode step by the length of the context and by the number of streams, for each strategy.

Beside each time is the shortest one that the machine allows: the bytes that a step must read and write, at the speed at
which memory was read just before, or its products with weights, at the speed of a large product. No prompt is computed:
the memory is filled with random numbers, and prompts of random tokens are committed to it through the interface of the
strategies, which compact and evict as usual. So a step reads as many keys as after a real prompt of this length.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cache_strategies.registry import BUILTIN
from cache_strategies.types import Geometry
from config.errors import SettingsError
from config.settings import Settings, load_settings
from kernels.memory import allocate
from kernels.selfcheck.op_counter import OpCounter
from server.engine.build import Engine, build_engine
from server.engine.instance import Instance
from server.evaluation.command import select_strategies
from server.profiling.machine import measure_matmul_flops, measure_read_bandwidth
from server.profiling.steps import average_fastest
from tools.bench.decoding.steps import decode_step, fill_at_random, opened_sequences
from tools.bench.growth.points import GrowthPoint, StepRound, summarize
from tools.bench.table.long_contexts import SETTINGS_FILE

CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16_384, 32_000)
STREAMS = (1, 2, 4, 8, 16, 32, 64, 128)
STEPS = 15  # of a round, if they are short
MIN_STEPS = 4
STEPS_SECONDS = 1.0  # after which a round has no further steps, once there are MIN_STEPS
WARMUP_STEPS = 5  # if they are short
MIN_WARMUP_STEPS = 2  # the first one summarizes the blocks of `quest`
WARMUP_SECONDS = 0.5
SPARE_TOKENS = STEPS + WARMUP_STEPS + 2  # that are decoded after a context
MIN_SEQ_LEN = 1344  # what the window of `streaming` needs
ATTENTION = "attend"  # the operation that reads keys and values


@dataclass(frozen=True)
class GrowthOptions:
    """What is measured on one model, and how often."""

    model: str  # its name in the report
    settings: Mapping[str, Any]  # as for `kvmux serve`
    strategies: Sequence[str] = ()  # as for `kvmux evaluate`; none: all of the settings file, and all built-in kinds
    contexts: Sequence[int] = CONTEXTS
    streams: Sequence[int] = STREAMS
    stream_context: int = 512  # tokens of each of several streams
    rounds: int = 3  # in each of which every strategy has a turn


class SpeedProbe:
    """Measures the speeds of this machine, with the threads of the engine."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._memory = torch.empty(0, dtype=torch.uint8)

    def measure_bandwidth(self, size: int) -> float:
        """Return the bytes per second at which `size` bytes are read."""
        size = max(4, size // 4 * 4)
        if len(self._memory) < size:
            self._memory = torch.empty(0)  # freed before the larger one is allocated
            self._memory = allocate(size)
        return measure_read_bandwidth(self._memory[:size].view(torch.float32))

    def measure_flops(self) -> float:
        """Return the floating-point operations per second of a large matrix product."""
        return measure_matmul_flops(self._dtype, torch.get_num_threads())


# -------------------------------------------------------------------- the two parts
def measure_by_context(options: GrowthOptions, show_status: Callable[[str], None]) -> Iterator[GrowthPoint]:
    """Yield the milliseconds of a step of one stream under each strategy, by context length."""
    timer = StepTimer(build(options, max(options.contexts) + SPARE_TOKENS, 1), options.rounds, show_status)
    for length in (length for length in options.contexts if length <= timer.longest):
        taken = timer.measure(1, length, f"{options.model}, context {length:,}")
        yield from (summarize("context", length, name, options.model, rounds) for name, rounds in taken.items())


def measure_by_streams(options: GrowthOptions, show_status: Callable[[str], None]) -> Iterator[GrowthPoint]:
    """Yield the milliseconds of a step, which decodes a token of each stream, by the number of streams."""
    engine = build(options, options.stream_context + SPARE_TOKENS, max(options.streams))
    timer = StepTimer(engine, options.rounds, show_status)
    context = min(options.stream_context, timer.longest)
    for count in options.streams:
        taken = timer.measure(count, context, f"{options.model}, {count} streams")
        yield from (summarize("streams", count, name, options.model, rounds) for name, rounds in taken.items())


def build(options: GrowthOptions, length: int, streams: int) -> Engine:
    """Build an engine for `streams` texts of `length` tokens, or of the model's context if that is shorter.

    Each strategy may use all memory. Raises SettingsError.
    """
    gc.collect()  # an engine before, which has references in circles, would keep its memory
    loaded = load_settings(SETTINGS_FILE, {**options.settings, "max_seq_len": None, "max_num_seqs": streams})
    strategies = {
        name: each.model_copy(update={"floor": "0%", "limit": "100%"})
        for name, each in select_strategies(loaded, options.strategies or list_strategies(loaded)).items()
    }
    chosen = {"strategies": strategies, "default_strategy": next(iter(strategies)), "rules": []}
    whole = loaded.model_copy(update=chosen)
    try:
        engine = build_engine(whole.model_copy(update={"max_seq_len": max(length, MIN_SEQ_LEN)}))
    except SettingsError as error:
        if "positions" not in str(error):
            raise
        engine = build_engine(whole)
    fill_at_random(next(iter(engine.core.instances.values())))
    return engine


def list_strategies(settings: Settings) -> list[str]:
    """Return the instances in the settings, the default one first, and all built-in kinds without an instance."""
    names = sorted(settings.strategies, key=lambda name: name != settings.default_strategy)
    kinds = {each.kind for each in settings.strategies.values()}
    return [*names, *(kind for kind in BUILTIN if kind not in kinds)]


# -------------------------------------------------------------------- one size
class StepTimer:
    """Measures decode steps of an engine under all of its strategies, by turns."""

    def __init__(self, engine: Engine, rounds: int, show_status: Callable[[str], None]) -> None:
        self.longest = engine.max_seq_len - SPARE_TOKENS  # tokens of a stream before the first step
        self._model = engine.core.model
        self._instances = engine.core.instances
        self._tracer = engine.core.tracer
        self._rounds = rounds
        self._show_status = show_status
        self._probe = SpeedProbe(self._model.dtype)

    def measure(self, streams: int, context: int, what: str) -> dict[str, list[StepRound]]:
        """Return the rounds of each strategy that has room for `streams` texts of `context` tokens.

        In every second round they take turns in reverse order, as other work disturbs the machine. `what` is shown.
        """
        taken: dict[str, list[StepRound]] = {name: [] for name in self._instances}
        flops = self._model.count_flops(streams, streams)
        for i in range(self._rounds):
            flops_per_second = self._probe.measure_flops()
            for name in list(taken)[:: -1 if i % 2 else 1]:
                self._show_status(f"{what}: {name}, round {i + 1} of {self._rounds}")
                counted = taken[name][0].read_bytes if taken[name] else None
                try:
                    turn = self._take_turn(self._instances[name], streams, context, counted)
                except SettingsError:  # no room
                    del taken[name]
                else:
                    taken[name].append(StepRound(*turn, flops, flops_per_second))
        return taken

    def _take_turn(
        self, instance: Instance, streams: int, context: int, counted: int | None
    ) -> tuple[float, int, float]:
        """Return (seconds of a step, bytes that it must read and write, bytes per second just before).

        `counted` are the bytes, if they are known. Raises SettingsError for lack of memory.
        """
        prompts = torch.randint(self._model.info.vocab_size, (streams, context)).tolist()
        with opened_sequences(instance, prompts) as sequences:

            def step() -> float:
                return decode_step(self._model, instance, sequences).total

            size = counted or self._count_bytes(instance, step, streams * context)
            repeat(step, WARMUP_STEPS, MIN_WARMUP_STEPS, WARMUP_SECONDS)
            bandwidth = self._probe.measure_bandwidth(size)
            times = repeat(step, STEPS, MIN_STEPS, STEPS_SECONDS)
        return average_fastest([{"step": each} for each in times])["step"], size, bandwidth

    def _count_bytes(self, instance: Instance, step: Callable[[], float], tokens: int) -> int:
        """Return the bytes that a step must read and write once, of `tokens` cached tokens of all streams.

        A strategy that attends without an operation of the backend is held against the reading of all keys and values.
        """
        with self._tracer.record(OpCounter()) as counter:
            step()
        counted = sum(counter.bytes.values())
        return counted if ATTENTION in counter.bytes else counted + tokens * count_kv_bytes(instance.setup.geometry)


def count_kv_bytes(geometry: Geometry) -> int:
    """Return the bytes of a token's keys and values in the model's dtype, in all layers."""
    numbers = sum(layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) for layer in geometry.layers)
    return numbers * geometry.kv_dtype.itemsize


def repeat(step: Callable[[], float], most: int, least: int, seconds: float) -> list[float]:
    """Run a step `most` times, or fewer but at least `least` times if these take more seconds; return their times."""
    times: list[float] = []
    while len(times) < most and (len(times) < least or sum(times) < seconds):
        times.append(step())
    return times
