"""Measures how the engine's costs grow with load, in this process; `python -m tools.bench growth --help`.

Beside each time is the shortest one that the machine allows: the bytes that a step must read and write, at the speed at
which memory was read just before, or its products with weights, at the speed of a large product.
"""

from __future__ import annotations

import gc
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from cache_strategies.registry import BUILTIN
from cache_strategies.types import Geometry
from config.errors import SettingsError
from config.settings import Settings, Weights, load_settings
from kernels.memory import allocate
from kernels.selfcheck.op_counter import OpCounter
from server.engine.build import Engine, build_engine
from server.engine.instance import Instance
from server.profiling.machine import measure_matmul_flops, measure_read_bandwidth
from server.profiling.steps import average_fastest
from tools.bench.counts import list_counts
from tools.bench.decode_steps import decode_step, opened_sequences
from tools.bench.decoding import use_strategies
from tools.bench.growth_plot import draw
from tools.bench.long_contexts import SETTINGS_FILE
from tools.bench.models import LLAMA, QWEN, cache_folder, make_model
from tools.bench.runner import Case, Context, Effort, Group, Reading, Row, Table

CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16_384, 32_000)
STREAMS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT_PART, STREAMS_PART = "context", "streams"
PARTS = (CONTEXT_PART, STREAMS_PART, "waiting", "blocks")
STEPS = 15  # of a turn, if they are short
MIN_STEPS = 4
STEPS_SECONDS = 1.0  # after which a turn has no further steps, once there are MIN_STEPS
WARMUP_STEPS = 5  # if they are short
MIN_WARMUP_STEPS = 2  # the first one summarizes the blocks of `quest`
WARMUP_SECONDS = 0.5
SPARE_TOKENS = STEPS + WARMUP_STEPS + 2  # that are decoded after a context
MIN_SEQ_LEN = 1344  # what the window of `streaming` needs
ATTENTION = "attend"  # the operation that reads keys and values
SMALL = replace(LLAMA, name=f"{LLAMA.name}-32k", max_positions=QWEN.max_positions)  # for as long contexts
SHAPES = {shape.name: shape for shape in (QWEN, SMALL)}


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--part", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    add(
        "--model",
        nargs="+",
        default=list(SHAPES),
        help=f"{' and '.join(SHAPES)}: models of these shapes with random weights (default: both); others as for "
        "`kvmux serve`",
    )
    add(
        "--strategies",
        nargs="+",
        default=[],
        help="as for `kvmux evaluate` (default: every built-in one, those with options as in long_contexts.toml)",
    )
    add("--contexts", nargs="+", type=int, default=CONTEXTS, help="tokens of one stream, up to the model's context")
    add("--streams", nargs="+", type=int, default=STREAMS, help="numbers of streams that are decoded together")
    add("--stream-context", type=int, default=512, help="tokens of each of several streams (default: 512)")
    add("--max-size", type=int, default=sys.maxsize, help="largest number of requests and of blocks")
    add("--dtype", default="auto", help="as for `kvmux serve`")
    add("--weights", default="auto", choices=get_args(Weights), help="as for `kvmux serve`")
    add("--kv-memory", default="8GiB", help="as for `kvmux serve`; sizes without room are left out (default: 8GiB)")
    add("--models", type=Path, default=cache_folder(), help="folder of the models (default: in the user's cache)")


def list_cases(context: Context) -> Iterator[Case]:
    """Yield a case for each size of each part. Raises SettingsError."""
    options = context.options
    if min(options.stream_context, *options.contexts, *options.streams) < 1:
        raise ValueError("--contexts, --streams and --stream-context should be at least 1")
    for name in options.model:
        yield from _list_times(name, options, context)
    yield from list_counts([part for part in PARTS[2:] if part in options.part], options.max_size)


def _list_times(name: str, options: Namespace, context: Context) -> Iterator[Case]:
    model = make_model(SHAPES[name], options.models, context.show_status) if name in SHAPES else name
    flags = {"model": str(model)} | {each: getattr(options, each) for each in ("dtype", "weights", "kv_memory")}
    longest, streams = max(options.contexts) + SPARE_TOKENS, max(options.streams)
    sizes: dict[str, tuple[int, int, list[tuple[int, int, int]]]] = {  # of an engine, and (size, streams, context)
        CONTEXT_PART: (longest, 1, [(each, 1, each) for each in sorted(options.contexts)]),
        STREAMS_PART: (
            options.stream_context + SPARE_TOKENS,
            streams,
            [(each, each, options.stream_context) for each in sorted(options.streams)],
        ),
    }
    for part in (part for part in PARTS[:2] if part in options.part):
        length, seats, loads = sizes[part]
        loaded = load_settings(SETTINGS_FILE, {**flags, "max_seq_len": None, "max_num_seqs": seats})
        settings = use_strategies(loaded, options.strategies or list_strategies(loaded))
        set_up, title = partial(run_timer, settings, length), f"{Path(name).name}, {part}"
        for size, number, tokens in loads:
            row = Row(f"{size:,}", "ms a step")
            measure = partial(_measure, row, number, tokens)
            yield Case(f"{title} {size:,}", Table(title), measure, list(settings.strategies), set_up)


def list_strategies(settings: Settings) -> list[str]:
    """Return the instances in the settings, the default one first, and all built-in kinds without an instance."""
    names = sorted(settings.strategies, key=lambda name: name != settings.default_strategy)
    kinds = {each.kind for each in settings.strategies.values()}
    return [*names, *(kind for kind in BUILTIN if kind not in kinds)]


def _measure(row: Row, streams: int, context: int, timer: StepTimer, strategy: str) -> Iterator[Reading]:
    if context > timer.longest:
        return  # longer than the model's context
    try:
        seconds, limit = timer.measure(strategy, streams, context)
    except SettingsError as error:  # no room
        yield Reading(row, None, reason=str(error))
    else:
        yield Reading(row, 1e3 * seconds, 1e3 * limit)


# -------------------------------------------------------------------- steps
@contextmanager
def run_timer(settings: Settings, length: int) -> Iterator[StepTimer]:
    """Yield an engine for texts of `length` tokens, or of the model's context if that is shorter, with a timer.

    Raises SettingsError.
    """
    gc.collect()  # an engine before, which has references in circles, would keep its memory
    try:
        engine = build_engine(settings.model_copy(update={"max_seq_len": max(length, MIN_SEQ_LEN)}))
    except SettingsError as error:
        if "positions" not in str(error):
            raise
        engine = build_engine(settings)
    yield StepTimer(engine)


@dataclass
class SpeedProbe:
    """Measures the speeds of this machine, with the threads of the engine."""

    dtype: torch.dtype
    _memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def measure_bandwidth(self, size: int) -> float:
        """Return the bytes per second at which `size` bytes are read."""
        size = max(4, size // 4 * 4)
        if len(self._memory) < size:
            self._memory = torch.empty(0)  # freed before the larger one is allocated
            self._memory = allocate(size)
        return measure_read_bandwidth(self._memory[:size].view(torch.float32))

    def measure_flops(self) -> float:
        """Return the floating-point operations per second of a large matrix product."""
        return measure_matmul_flops(self.dtype, torch.get_num_threads())


class StepTimer:
    """Measures decode steps of an engine under its strategies."""

    def __init__(self, engine: Engine) -> None:
        self.longest = engine.max_seq_len - SPARE_TOKENS  # tokens of a stream before the first step
        self._model = engine.core.model
        self._instances = engine.core.instances
        self._tracer = engine.core.tracer
        self._probe = SpeedProbe(self._model.dtype)

    def measure(self, strategy: str, streams: int, context: int) -> tuple[float, float]:
        """Return the seconds of a step of `streams` texts of `context` tokens, and the least that the machine allows.

        Raises SettingsError for lack of memory.
        """
        instance, flops = self._instances[strategy], self._model.count_flops(streams, streams)
        prompts = torch.randint(self._model.info.vocab_size, (streams, context)).tolist()
        with opened_sequences(instance, prompts) as sequences:

            def step() -> float:
                return decode_step(self._model, instance, sequences).total

            size = self._count_bytes(instance, step, streams * context)
            repeat(step, WARMUP_STEPS, MIN_WARMUP_STEPS, WARMUP_SECONDS)
            limit = max(size / self._probe.measure_bandwidth(size), (flops or 0) / self._probe.measure_flops())
            times = repeat(step, STEPS, MIN_STEPS, STEPS_SECONDS)
        return average_fastest([{"step": each} for each in times])["step"], limit

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


GROUP = Group(
    """\
The time of a decode step under each built-in strategy, by the context of one stream and by the number of streams, each
beside the least time that this machine allows: that of reading weights, keys and values once at the speed of the
memory, measured just before, or that of the products. And the number of function calls by the number of waiting
requests and of cached blocks, which should be constant.

Prompts are not computed: keys and values are random numbers, and the strategies are given prompts of random tokens as
if they had been computed, which they compact and evict as usual. Times leave out scheduling, sampling and
compaction.""",
    list_cases,
    add_arguments,
    Effort(3),
    document="performance.md",
    parts=("part", "model", "strategies"),
    draw=draw,
)
