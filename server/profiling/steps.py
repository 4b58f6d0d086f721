"""Runs steps of an engine in this process and measures each part of them. Starts no server and formats nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

import torch

from kernels.selfcheck.op_counter import OpCounter
from server.engine.build import Engine
from server.engine.core import Core
from server.engine.ipc.messages import SamplingParams, Submit, Tokens
from server.profiling.spans import SpanTimer

WARMUP_STEPS = 5
WORKER = 0
MODEL = "the model's other work"
SAMPLING = "sampling"
SCHEDULING = "scheduling"
LAYOUT = "laying out the batch"
COMPACTION = "dropping keys"
BOOKKEEPING = "books and events"
# Names that a report gives to the spans (timed parts) of an engine's step.
LABELS = {
    "forward": MODEL,
    "sample_and_verify": SAMPLING,
    "schedule": SCHEDULING,
    "plan": LAYOUT,
    "compact": COMPACTION,
}


@dataclass(frozen=True)
class Steps:
    """Measurements of one kind of step; its seconds are means over the fastest fifth of the steps."""

    sequences: int  # number of sequences that decode; 0: the steps compute a prompt
    tokens: int  # number of cached tokens of each sequence before the step; in prefill, number of the prompt's tokens
    seconds: Mapping[str, float]  # mean seconds of each operation, and each other part, of a step
    calls: Mapping[str, int]  # number of calls of each operation in a step
    bytes: Mapping[str, int]  # number of bytes that each operation must read and write in a step
    flops: int | None  # floating-point operations of a step in matrix products; None: not known for this model

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def measure_decode(engine: Engine, kv_cache: str, sequences: int, context: int, steps: int) -> Steps:
    """Measure decode steps of `sequences` greedy sequences, after prompts of `context` tokens."""
    core = engine.core
    for i in range(sequences):
        _submit(core, str(i), context, steps + 2 * WARMUP_STEPS + sequences, kv_cache)
    decoding: set[str] = set()
    while len(decoding) < sequences:
        decoding |= {event.message.request_id for event in core.step().events if isinstance(event.message, Tokens)}
    for _ in range(WARMUP_STEPS):
        core.step()
    with core.tracer.record(OpCounter()) as counter:
        core.step()
    with trace_steps(engine) as step:
        taken = [step() for _ in range(steps)]
    core.cancel_worker(WORKER)
    return _make_steps(engine, sequences, context, taken, counter, sequences)


def measure_prefill(engine: Engine, kv_cache: str, tokens: int, steps: int) -> Steps:
    """Measure steps that each compute a prompt of `tokens` tokens and sample the token after it."""
    core = engine.core

    def submit_prompt(name: str) -> None:
        _submit(core, name, tokens, 1, kv_cache)

    submit_prompt("warm")
    core.step()
    submit_prompt("recorded")
    with core.tracer.record(OpCounter()) as counter:
        core.step()
    taken = []
    with trace_steps(engine) as step:
        for i in range(steps):
            submit_prompt(str(i))
            taken.append(step())
            assert not core.busy, "the prompt did not fit into one step"
    return _make_steps(engine, 0, tokens, taken, counter, tokens)


def _submit(core: Core, name: str, prompt: int, answer: int, kv_cache: str) -> None:
    ids = torch.randint(core.model.info.vocab_size, (prompt,)).tolist()
    sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    refused = core.submit(WORKER, Submit(name, ids, sampling, kv_cache))
    assert refused is None, refused


@contextmanager
def trace_steps(engine: Engine) -> Iterator[Callable[[], dict[str, float]]]:
    """Yield a function that runs a step and returns the seconds of each of its parts, by name.

    Switches the engine's own timing of operations off within the block.
    """
    core, timed_every = engine.core, engine.core.timing_interval

    def run_step() -> dict[str, float]:
        timer.begin()
        core.step()
        return {LABELS.get(name, name): seconds for name, seconds in timer.end().items()}

    core.timing_interval = 0
    try:
        with core.tracer.record(SpanTimer(BOOKKEEPING, core.model.device)) as timer:
            yield run_step
    finally:
        core.timing_interval = timed_every


def _make_steps(
    engine: Engine,
    sequences: int,
    context: int,
    taken: Sequence[Mapping[str, float]],
    counter: OpCounter,
    rows: int,
) -> Steps:
    flops = engine.core.model.count_flops(rows, sequences or 1)
    return Steps(sequences, context, average_fastest(taken), dict(counter.calls), dict(counter.bytes), flops)


def average_fastest(taken: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean seconds of each part over the fastest fifth of steps, which other processes disturbed least."""
    kept = sorted(taken, key=lambda parts: sum(parts.values()))[: -(-len(taken) // 5)]
    names = dict.fromkeys(name for parts in kept for name in parts)
    return {name: fmean(parts.get(name, 0.0) for parts in kept) for name in names}
