"""Runs steps of an engine in this process and says what each part of them took. Knows no server, no table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import fmean

import torch

from kernels.tracing import OpCounter
from server.engine import model_runner
from server.engine.build import Engine
from server.engine.core import Core
from server.engine.ipc.messages import SamplingParams, Submit, Tokens
from server.engine.sampling.sampler import Sampler
from server.models.config import ModelConfig
from server.models.decoder import Decoder
from server.profiling.spans import Spans, SpansOfOps

WARMUP_STEPS = 5
WORKER = 0
MODEL = "the model's other work"
SAMPLING = "sampling"
SCHEDULING = "scheduling"
LAYOUT = "laying out the batch"
BOOKKEEPING = "books and events"


@dataclass(frozen=True)
class Steps:
    """Steps of one kind: means of the quickest fifth."""

    sequences: int  # that decode; 0: a prompt is computed
    tokens: int  # of each in the cache before the step; of a prompt, those that enter
    seconds: Mapping[str, float]  # by operation and by the names above
    calls: Mapping[str, int]  # of each operation in a step
    bytes: Mapping[str, int]  # that these must move
    flops: int | None  # floating-point operations in products; None: not known for this model

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def measure_decode(engine: Engine, kv_cache: str, sequences: int, context: int, steps: int) -> Steps:
    """Measure steps of `sequences` greedy sequences, all past their prompts of `context` tokens."""
    core = engine.core
    for i in range(sequences):
        _submit(core, str(i), context, steps + 2 * WARMUP_STEPS + sequences, kv_cache)
    decoding: set[str] = set()
    while len(decoding) < sequences:
        decoding |= {event.message.request_id for event in core.step().events if isinstance(event.message, Tokens)}
    for _ in range(WARMUP_STEPS):
        core.step()
    with OpCounter(engine.kernels.ops) as recorder:
        core.step()
    with trace_steps(engine) as step:
        taken = [step() for _ in range(steps)]
    core.cancel_worker(WORKER)
    return _make_steps(engine, sequences, context, taken, recorder, sequences)


def measure_prefill(engine: Engine, kv_cache: str, tokens: int, steps: int) -> Steps:
    """Measure steps that compute a prompt of `tokens` tokens each, and draw the token after it."""
    core = engine.core

    def submit_prompt(name: str) -> None:
        _submit(core, name, tokens, 1, kv_cache)

    submit_prompt("warm")
    core.step()
    submit_prompt("recorded")
    with OpCounter(engine.kernels.ops) as recorder:
        core.step()
    taken = []
    with trace_steps(engine) as step:
        for i in range(steps):
            submit_prompt(str(i))
            taken.append(step())
            assert not core.busy, "the prompt did not fit into one step"
    return _make_steps(engine, 0, tokens, taken, recorder, tokens)


def _submit(core: Core, name: str, prompt: int, answer: int, kv_cache: str) -> None:
    ids = torch.randint(core.model.info.vocab_size, (prompt,)).tolist()
    sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    refused = core.submit(WORKER, Submit(name, ids, sampling, kv_cache))
    assert refused is None, refused


@contextmanager
def trace_steps(engine: Engine) -> Iterator[Callable[[], dict[str, float]]]:
    """Yield a function that runs a step and returns the seconds of its parts.

    The engine times no operations meanwhile.
    """
    core, spans, timed_every = engine.core, Spans(BOOKKEEPING), engine.core.timing_interval

    def run_step() -> dict[str, float]:
        spans.begin()
        core.step()
        return spans.end()

    core.timing_interval = 0
    try:
        with ExitStack() as stack:
            stack.enter_context(SpansOfOps(engine.kernels.ops, core.model.device.type, spans))
            stack.enter_context(spans.trace_calls(core.model, "forward", MODEL))
            stack.enter_context(spans.trace_calls(core.scheduler, "schedule", SCHEDULING))
            stack.enter_context(spans.trace_calls(model_runner, "Batch", LAYOUT))
            stack.enter_context(spans.trace_calls(Sampler, "sample", SAMPLING))
            yield run_step
    finally:
        core.timing_interval = timed_every


def _make_steps(
    engine: Engine,
    sequences: int,
    context: int,
    taken: Sequence[Mapping[str, float]],
    recorder: OpCounter,
    rows: int,
) -> Steps:
    model = engine.core.model
    products = count_flops(model.config, rows, sequences or 1) if isinstance(model, Decoder) else None
    return Steps(sequences, context, average_fastest(taken), dict(recorder.calls), dict(recorder.bytes), products)


def average_fastest(taken: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return means over the quickest fifth of the steps: those that other processes disturbed least."""
    kept = sorted(taken, key=lambda parts: sum(parts.values()))[: -(-len(taken) // 5)]
    names = dict.fromkeys(name for parts in kept for name in parts)
    return {name: fmean(parts.get(name, 0.0) for parts in kept) for name in names}


def count_flops(c: ModelConfig, rows: int, drawn: int) -> int:
    """Count the floating-point operations of a step's products of weights: `rows` tokens enter, `drawn` have logits."""
    d, heads, kv = c.hidden_size, c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention = (heads + 2 * kv) * d + heads * d
    widths = [
        c.intermediate_size if e is None else e.num_experts_per_tok * e.intermediate_size
        for e in (layer.experts for layer in c.layers)
    ]
    return 2 * rows * sum(attention + 3 * width * d for width in widths) + 2 * drawn * c.vocab_size * d
