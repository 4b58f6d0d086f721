"""`python -m tools.bench.metrics`: measures the share of a step that metrics and the timing of operations take.

Runs the engine without HTTP, with a constant number of streams. Rounds with and without metrics alternate, so that
other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

from config.errors import SettingsError
from config.settings import load_settings
from server.engine.build import Engine, build_engine
from server.engine.core import TIMING_INTERVAL
from server.engine.info import make_engine_info, read_engine_state
from server.engine.ipc.messages import SamplingParams, Submit
from server.engine.results import StepResult
from server.metrics.exposition import Renderer
from server.metrics.registry import Metrics

WORKER = 0


class MetricsCost(NamedTuple):
    """The cost of metrics in microseconds, as medians of the rounds."""

    sequences: int
    step: float  # a step without metrics
    step_with_metrics: float
    observe_time: float  # the part of a step that is spent in the registry
    overhead: float  # median over rounds of the time with / without metrics, less 1
    scrape: float  # the engine's part of one GET /metrics, at most once a second
    render: float  # the API process's part of one GET /metrics


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.metrics", description=__doc__)
    add_stream_options(parser)
    parser.add_argument("--rounds", type=int, default=40, help="rounds, each with and without metrics")
    parser.add_argument("--steps", type=int, default=100, help="steps of a round")
    parser.add_argument("--json", action="store_true", help="print a JSON line instead of a sentence")
    options = parser.parse_args(arguments)
    engine = build_engine_for_streams(parser, options)
    cost = measure(engine, options.sequences, options.tokens, options.rounds, options.steps)
    print(json.dumps(cost._asdict()) if options.json else format_cost(cost))


def add_stream_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark that decodes constant `Streams`: of the engine, and of the streams."""
    parser.add_argument("--model", default="tiny", help="as for `kvmux serve` (default: the embedded one)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: as `kvmux serve` chooses)")
    parser.add_argument("--sequences", type=int, default=16, help="number of sequences that are decoded together")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each prompt, and of each answer")


def build_engine_for_streams(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Engine:
    """Return the engine that the options of add_stream_options() ask for; exit with a message if it cannot be built."""
    try:
        flags = {"model": options.model, "threads": options.threads, "max_num_seqs": options.sequences}
        return build_engine(load_settings(None, {name: value for name, value in flags.items() if value is not None}))
    except SettingsError as error:
        parser.error(str(error))


class Streams:
    """A constant number of running requests, spread over all strategies: each that ends is replaced."""

    def __init__(self, engine: Engine, sequences: int, tokens: int) -> None:
        self._core = engine.core
        self._sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._names = [instance.name for instance in engine.instances]
        self._vocab, self._tokens, self._num_submitted = engine.core.model.info.vocab_size, tokens, 0
        self._submit(sequences)

    def _submit(self, count: int) -> None:
        for _ in range(count):
            self._num_submitted += 1
            prompt = torch.randint(self._vocab, (self._tokens,)).tolist()
            name = self._names[self._num_submitted % len(self._names)]
            error = self._core.submit(WORKER, Submit(str(self._num_submitted), prompt, self._sampling, name))
            assert error is None, error

    def step(self) -> StepResult:
        result = self._core.step()
        self._submit(len(result.finished))
        return result


def measure(engine: Engine, sequences: int, tokens: int, rounds: int, steps: int) -> MetricsCost:
    """Measure steps with and without metrics, alternately; the first round is a warm-up."""
    streams, metrics = Streams(engine, sequences, tokens), Metrics(make_engine_info(engine))
    plain: list[float] = []
    counted: list[float] = []
    observe_times: list[float] = []
    for i in range(rounds + 1):
        for with_metrics in (False, True) if i % 2 else (True, False):
            engine.core.timing_interval = TIMING_INTERVAL if with_metrics else 0
            start, observe_seconds = time.perf_counter(), 0.0
            for _ in range(steps):
                result = streams.step()
                if with_metrics:
                    observe_seconds += observe(metrics, result)
            seconds = time.perf_counter() - start
            if i:
                (counted if with_metrics else plain).append(1e6 * seconds / steps)
                observe_times += [1e6 * observe_seconds / steps] if with_metrics else []
    start = time.perf_counter()
    snapshot = metrics.snapshot(read_engine_state(engine, {}))
    scrape = 1e6 * (time.perf_counter() - start)
    renderer = Renderer()
    renderer.render(snapshot, openmetrics=False)  # the first call caches the constant parts
    start = time.perf_counter()
    renderer.render(snapshot, openmetrics=False)
    render = 1e6 * (time.perf_counter() - start)
    overhead = median(on / off for on, off in zip(counted, plain, strict=True)) - 1
    return MetricsCost(sequences, median(plain), median(counted), median(observe_times), overhead, scrape, render)


def observe(metrics: Metrics, result: StepResult) -> float:
    """Record a step in the metrics, as the engine's loop does; return the seconds that it took."""
    start = time.perf_counter()
    metrics.observe(result.report, result.finished)
    return time.perf_counter() - start


def format_cost(cost: MetricsCost) -> str:
    return (
        f"a step of {cost.sequences} sequences takes {cost.step:,.0f} us, with metrics {cost.step_with_metrics:,.0f} "
        f"us ({cost.overhead:+.1%}); of these {cost.observe_time:.0f} us ({cost.observe_time / cost.step:.1%}) are in "
        "the registry. "
        f"/metrics takes {cost.scrape:.0f} us of the engine, {cost.render / 1000:.1f} ms of an API process"
    )


if __name__ == "__main__":
    main()
