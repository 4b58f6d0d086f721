"""`python -m tools.bench.checks`: measures what checks of addresses cost, and copying the tokens that a strategy keeps.

Decodes with the engine without HTTP, and after each step's batch is made, times `Batch.check_plans`: with it, plug-ins'
addresses are checked in every step, and all others' after a failed one. Its share of the step is printed beside the
limit. Then it copies 2,048 tokens in 24 layers by `Ops.copy_tokens`, as a strategy does that has dropped the other
tokens, with each backend.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.backends import REFERENCE, list_backends
from kernels.ops import Attention, Ops
from kernels.reference.backend import ReferenceOps
from server.engine.batch import Batch
from server.engine.build import Engine
from server.engine.core import Core
from server.engine.scheduling.selection import Selector
from server.models.base import Model
from tools.bench.kernel_inputs import BLOCK_SIZE, LAYERS, Calls, Sequences
from tools.bench.metrics import Streams, add_stream_options, build_engine_for_streams

LIMIT = 0.01  # largest share of a step that checks may take
KEPT_TOKENS = 2048


class ChecksCost(NamedTuple):
    """The cost of checking addresses in a decode step, in microseconds, as medians of the steps."""

    sequences: int
    step: float
    checks: float
    share: float  # of the step without them

    @property
    def is_within_limit(self) -> bool:
        return self.share < LIMIT


class CopyCost(NamedTuple):
    """The milliseconds in which a backend copies KEPT_TOKENS tokens in all layers: the fastest of the rounds."""

    backend: str
    milliseconds: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.checks", description=__doc__)
    add_stream_options(parser)
    parser.add_argument("--steps", type=int, default=1000, help="steps to measure")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of copying tokens")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of sentences")
    options = parser.parse_args(arguments)
    engine = build_engine_for_streams(parser, options)
    cost = measure_checks(engine, options.sequences, options.tokens, options.steps)
    print(json.dumps(cost._asdict()) if options.json else format_cost(cost), flush=True)
    calls = make_copies()
    for name, load in list_measured_backends():
        copies = CopyCost(name, 1e3 * measure_copies(load(), calls, options.rounds))
        print(json.dumps(copies._asdict()) if options.json else format_copies(copies), flush=True)


class CheckedModel:
    """A model that checks each batch before it computes it, and notes the seconds of the checks."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        assert isinstance(attention, Batch)
        start = time.perf_counter()
        attention.check_plans()
        self.seconds = time.perf_counter() - start
        return self._model.forward(ids, attention)


def measure_checks(engine: Engine, sequences: int, tokens: int, steps: int) -> ChecksCost:
    """Measure steps after a warm-up, with requests spread over all strategies."""
    core, settings = engine.core, engine.settings
    model: Any = CheckedModel(core.model)
    ops = next(iter(core.caches.values())).setup.ops  # the same object for all strategies
    selector = Selector(settings.strategies.keys(), settings.rules, settings.default_strategy)
    checked = Core(
        model, core.isolation, core.arena, core.scheduler, selector, core.rollouts, ops, core.tracer, core.grammars
    )
    streams = Streams(replace(engine, core=checked), sequences, tokens)
    seconds: list[tuple[float, float]] = []
    for _ in range(steps + 2 * tokens):
        start = time.perf_counter()
        streams.step()
        seconds.append((time.perf_counter() - start, model.seconds))
    measured = seconds[2 * tokens :]
    step, spent = (1e6 * median(each) for each in zip(*measured, strict=True))
    return ChecksCost(sequences, step, spent, median(part / (whole - part) for whole, part in measured))


def list_measured_backends() -> list[tuple[str, Callable[[], Ops]]]:
    """Return the names of the reference and of this machine's CPU backends, and functions that load them."""
    usable = [backend for backend in list_backends("cpu") if backend.missing is None]
    return [(REFERENCE, ReferenceOps), *((backend.name, backend.load) for backend in usable)]


def make_copies() -> Calls:
    """Return a call of `copy_tokens` for each layer, which copies every other token of one half of a sequence."""
    sequences = Sequences(torch.bfloat16, 3 * KEPT_TOKENS)
    slots = (sequences.block_table[0].long()[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
    src, dst = slots[: 2 * KEPT_TOKENS : 2].contiguous(), slots[2 * KEPT_TOKENS :]
    return [(sequences.store, layer, src, dst) for layer in range(len(LAYERS))]


def measure_copies(ops: Ops, calls: Calls, rounds: int) -> float:
    """Return the seconds of the fastest round, in which all layers are copied."""
    return min(_time(partial(_copy_all, ops, calls)) for _ in range(rounds))


def _copy_all(ops: Ops, calls: Calls) -> None:
    for call in calls:
        ops.copy_tokens(*call)


def _time(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def format_cost(cost: ChecksCost) -> str:
    verdict = "within" if cost.is_within_limit else "ABOVE"
    return (
        f"a step of {cost.sequences} sequences takes {cost.step:,.0f} us, of which checks of addresses take "
        f"{cost.checks:.1f} us: {cost.share:.2%}, {verdict} the limit of {LIMIT:.0%}"
    )


def format_copies(cost: CopyCost) -> str:
    layers = len(LAYERS)
    return f"{cost.backend} copies {KEPT_TOKENS:,} tokens in {layers} layers in bfloat16 in {cost.milliseconds:.1f} ms"


if __name__ == "__main__":
    main()
