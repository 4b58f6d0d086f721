"""Measures what structured output costs; `python -m tools.bench grammars --help`."""

from __future__ import annotations

import random
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import median

import numpy as np

from config.settings import load_settings
from server.engine.build import Engine, build_engine
from server.engine.core import Core
from server.engine.grammar.compiled import CompiledGrammar
from server.engine.grammar.state import GrammarState
from server.engine.ipc.messages import SamplingParams, Submit
from server.grammar.constraint import Constraint, constrain_to_choices, constrain_to_schema
from server.grammar.lark import write_lark
from server.grammar.matcher import TokenTable, compile_grammar
from server.text.encoder import Encoder
from tools.bench.models import SHAPES, find_model
from tools.bench.runner import Case, Context, Effort, Group, Reading, Row, Table

WORKER = 0
NUM_TOKENS, MAX_TOKENS = 2000, 200  # tokens of all texts by a grammar at least, and of one text at most
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,12}$"}},
        "address": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PEOPLE = constrain_to_schema({"type": "array", "items": PERSON, "minItems": 100_000}, "")  # never ends
WIDE = {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(200)}}
GRAMMARS: Mapping[str, Constraint] = {
    "any JSON object": constrain_to_schema({"type": "object"}, ""),
    "people": PEOPLE,
    "200 optional properties": constrain_to_schema(WIDE, ""),
    "enum of 1,000": constrain_to_schema({"enum": [f"value {i}" for i in range(1000)]}, ""),
    "choice of 1,000": constrain_to_choices([f"value {i}" for i in range(1000)], ""),
    "regex": Constraint("regex", r"[a-z]+(-[0-9]{2,4}){3,300}", ""),
    "arithmetic": Constraint("grammar", 'start: e\ne: t (("+"|"-") t)*\nt: /[0-9]+/ | "(" e ")"', ""),
}


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="qwen2.5-0.5b", help=f"as for `kvmux serve`, or one of {', '.join(SHAPES)}")
    add("--streams", type=int, default=16, help="requests of a batch (default: 16)")
    add("--steps", type=int, default=24, help="steps of a turn (default: 24)")
    add("--threads", type=int, help="CPU threads (default: as `kvmux serve` chooses)")


def list_cases(context: Context) -> Iterator[Case]:
    """Yield a case for the work of a token by each grammar, and one for batches with constrained requests."""
    options = context.options
    set_up = partial(_start, options, context)
    grammars = Table("a token by a grammar", variants_are_rows=True)
    yield Case("grammars", grammars, _measure_grammar, list(GRAMMARS), set_up, max_turns=1)
    counts = {f"{count} constrained": count for count in (0, 1, options.streams)}
    base, *_ = counts
    yield Case(
        "batches",
        Table(f"a step of {options.streams} requests", base=base),
        lambda engine, variant: [_measure_batch(engine.core, counts[variant], options)],
        list(counts),
        set_up,
        warm_ups=1,
    )


@contextmanager
def _start(options: Namespace, context: Context) -> Iterator[Engine]:
    """Yield an engine that has compiled the grammar of batches. Raises SettingsError."""
    flags = {
        "model": str(find_model(options.model, context.show_status)),
        "threads": options.threads,
        "max_num_seqs": options.streams,
        "max_seq_len": 64 + options.steps,
        "kv_memory": "512MiB",
    }
    engine = build_engine(load_settings(None, {name: value for name, value in flags.items() if value is not None}))
    engine.core.timing_interval = 0
    while not engine.grammars.prepare(write_lark(PEOPLE.kind, PEOPLE.text)):
        time.sleep(0.01)
    yield engine


# ---------------------------------------------------------------- one grammar
def _measure_grammar(engine: Engine, name: str) -> Iterator[Reading]:
    """Compile a grammar, and write texts at random by it as the engine follows them."""
    table, draw = TokenTable(Encoder.from_directory(engine.model_dir).vocabulary), np.random.default_rng(0)
    tokenizer, constraint = table.make_tokenizer(), GRAMMARS[name]
    began = time.perf_counter()
    matcher = compile_grammar(tokenizer, write_lark(constraint.kind, constraint.text))
    yield Reading(Row("compile", "ms"), 1e3 * (time.perf_counter() - began))
    compiled, seconds = CompiledGrammar(matcher, table.end_id), list[float]()
    while len(seconds) < NUM_TOKENS:
        seconds += time_text(GrammarState(compiled, engine.core.model.info.vocab_size), draw)
    yield Reading(Row("work for a token, mean", "µs"), 1e6 * float(np.mean(seconds)))
    yield Reading(Row("work for a token, p99", "µs"), 1e6 * float(np.percentile(seconds, 99)))


def time_text(state: GrammarState, draw: np.random.Generator) -> list[float]:
    """Return the seconds of mask and step for each token of a text, drawn from the allowed ones."""
    works: list[float] = []
    while not state.is_complete and state.fault is None and len(works) < MAX_TOKENS:
        began = time.perf_counter()
        (mask,) = state.compute_masks((), (), ())
        work = time.perf_counter() - began
        allowed = np.flatnonzero(mask)
        if not len(allowed):
            break
        token = int(draw.choice(allowed))
        began = time.perf_counter()
        state.accept(token)
        works.append(work + time.perf_counter() - began)
    return works


# ---------------------------------------------------------------- batches
def _measure_batch(core: Core, constrained: int, options: Namespace) -> Reading:
    """Measure decode steps, with `constrained` of the requests by the grammar PEOPLE."""
    grammar, draw = write_lark(PEOPLE.kind, PEOPLE.text), random.Random()
    for i in range(options.streams):
        sampling = SamplingParams(options.steps + 8, temperature=1.0, seed=draw.randrange(2**32), ignore_eos=True)
        prompt = [draw.randrange(core.model.info.vocab_size) for _ in range(16)]
        refused = core.submit(WORKER, Submit(str(i), prompt, sampling, grammar=grammar if i < constrained else None))
        assert refused is None, refused
    while any(request.num_remaining_tokens > 1 for request in core.scheduler.running) or core.scheduler.waiting:
        core.step()
    taken = []
    for _ in range(options.steps):
        began = time.perf_counter()
        result = core.step()
        taken.append(time.perf_counter() - began)
        assert result.report.rows == options.streams, "a request has ended early"
    core.cancel_worker(WORKER)
    core.step()
    return Reading(Row("a step", "ms"), 1e3 * median(taken))


GROUP = Group(
    """\
First it compiles grammars for the model's vocabulary and writes texts at random: the time of compiling, and that of the
grammar's work for a token (mask and step). Then the engine, without HTTP, decodes batches by turns: without a grammar,
with one request that has one, and with all.""",
    list_cases,
    add_arguments,
    Effort(7),
)
