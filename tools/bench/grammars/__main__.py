"""`python -m tools.bench.grammars`: measures what structured output costs.

First it compiles grammars for the model's vocabulary and writes texts at random. It prints the time of compiling, and
that of the grammar's work for a token (mask and step). Then the engine, without HTTP, decodes batches in turns: without
a grammar, with one request that has one, and with all. The steps of a turn are divided by those of the turn without one
in the same round. With `--xgrammar` it only compares llguidance's masks with those of that library, which runs in an
environment of its own.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from config.errors import SettingsError
from config.settings import load_settings
from server.engine.build import Engine, build_engine
from server.engine.core import Core
from server.engine.grammar.compiled import CompiledGrammar
from server.engine.grammar.state import GrammarState
from server.engine.ipc.messages import SamplingParams, Submit
from server.grammar.constraint import Constraint, constrain_to_choices, constrain_to_schema
from server.grammar.lark import write_lark
from server.grammar.matcher import TokenTable, compile_grammar
from server.models.files.directory import locate
from server.text.encoder import Encoder
from tools.bench.grammars.libraries import time_llguidance, time_xgrammar
from tools.bench.grammars.timing import GrammarTimes, format_rows, time_texts
from tools.bench.table.models import SHAPES, cache_folder, make_model, peers_folder
from tools.compare_checkouts import compute_interval
from tools.peers.installer import Installer, InstallError, parse_folder

WORKER = 0
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


class BatchCost(NamedTuple):
    """A decode step of a batch with constrained requests, and its ratio to one without, in the same rounds."""

    constrained: int
    step_ms: float
    ratio: float
    interval: tuple[float, float]  # 95 %


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.grammars", description=__doc__)
    add = parser.add_argument
    add("--model", default="qwen2.5-0.5b", help=f"as for `kvmux serve`, or one of {', '.join(SHAPES)}")
    add("--streams", type=int, default=16, help="requests of a batch (default: 16)")
    add("--steps", type=int, default=24, help="steps of a turn (default: 24)")
    add("--rounds", type=int, default=7, help="rounds, in each of which every batch has a turn (default: 7)")
    add("--threads", type=int, help="CPU threads (default: as `kvmux serve` chooses)")
    add("--xgrammar", action="store_true", help="only compare llguidance's masks with xgrammar's, which is installed")
    add("--folder", type=parse_folder, default=peers_folder(), help="folder of xgrammar (default: the user's cache)")
    add("--pip-args", default="", help="further arguments of pip, such as an index with torch's builds for CPUs")
    options = parser.parse_args(arguments)
    try:
        if options.xgrammar:
            return compare_libraries(options)
        engine = build(options)
    except SettingsError as error:
        parser.error(str(error))
    print("| grammar | compile | work for a token, mean | p99 | tokens |\n|---|---:|---:|---:|---:|")
    for name, times in measure_grammars(engine):
        print(
            f"| {name} | {times.compile_ms:.1f} ms | {times.mean_us:.0f} us | {times.p99_us:.0f} us | {times.tokens} |"
        )
    print(f"\n| constrained of {options.streams} | step | of that without | 95 % |\n|---:|---:|---:|---:|")
    for cost in measure_batches(engine, options):
        low, high = cost.interval
        print(f"| {cost.constrained} | {cost.step_ms:.2f} ms | {cost.ratio:.3f} | {low:.3f} to {high:.3f} |")
    return 0


def find_model(options: argparse.Namespace) -> str:
    """Return the model as a setting; if it is one of SHAPES, its directory, made if it is not there."""
    if options.model not in SHAPES:
        return str(options.model)
    return str(make_model(SHAPES[options.model], cache_folder(), show_status))


def show_status(status: str) -> None:
    print(status, file=sys.stderr)


def build(options: argparse.Namespace) -> Engine:
    """Build the engine. Raises SettingsError."""
    flags: dict[str, Any] = {
        "model": find_model(options),
        "threads": options.threads,
        "max_num_seqs": options.streams,
        "max_seq_len": 64 + options.steps,
        "kv_memory": "512MiB",
    }
    return build_engine(load_settings(None, {name: value for name, value in flags.items() if value is not None}))


def compare_libraries(options: argparse.Namespace) -> int:
    """Print the times of both libraries; return the exit code. Raises SettingsError without the model."""
    table = TokenTable(Encoder.from_directory(locate(find_model(options), None)).vocabulary)
    installer = Installer(options.folder / "xgrammar", shlex.split(options.pip_args), show_status)
    try:
        theirs = time_xgrammar(table, GRAMMARS, installer)
    except InstallError as error:
        print(f"xgrammar cannot be measured: {error}", file=sys.stderr)
        return 1
    print(*format_rows({"llguidance": time_llguidance(table, GRAMMARS), "xgrammar": theirs}), sep="\n")
    return 0


# ---------------------------------------------------------------- one grammar
class EngineMatcher:
    """A text by a compiled grammar, as the engine follows it."""

    def __init__(self, compiled: CompiledGrammar, vocab_size: int) -> None:
        self._state = GrammarState(compiled, vocab_size)
        self._mask = np.zeros(vocab_size, np.bool_)

    def fill_mask(self) -> None:
        (self._mask,) = self._state.compute_masks((), (), ())

    def list_allowed(self) -> NDArray[np.intp]:
        return np.flatnonzero(self._mask)

    def accept(self, token: int) -> bool:
        self._state.accept(token)
        return self._state.is_complete or self._state.fault is not None


def measure_grammars(engine: Engine) -> Iterator[tuple[str, GrammarTimes]]:
    """Yield the times of each grammar."""
    table = TokenTable(Encoder.from_directory(engine.model_dir).vocabulary)
    tokenizer = table.make_tokenizer()
    vocab_size, draw = engine.core.model.info.vocab_size, np.random.default_rng(0)
    for name, constraint in GRAMMARS.items():
        began = time.perf_counter()
        matcher = compile_grammar(tokenizer, write_lark(constraint.kind, constraint.text))
        seconds = time.perf_counter() - began
        compiled = CompiledGrammar(matcher, table.end_id)
        yield name, time_texts(partial(EngineMatcher, compiled, vocab_size), draw, seconds)


# ---------------------------------------------------------------- batches
def measure_batches(engine: Engine, options: argparse.Namespace) -> Iterator[BatchCost]:
    """Give the batches their turns, in another order in every second round; the first round is a warm-up."""
    grammar = write_lark(PEOPLE.kind, PEOPLE.text)
    core = engine.core
    while not engine.grammars.prepare(grammar):
        time.sleep(0.01)
    core.timing_interval = 0
    counts = [0, 1, options.streams]
    steps: dict[int, list[float]] = {count: [] for count in counts}
    draw = random.Random(0)
    for i in range(options.rounds + 1):
        for count in counts if i % 2 else reversed(counts):
            seconds = take_turn(core, grammar, count, options, draw)
            if i:
                steps[count].append(seconds)
    for count in counts:
        ratios = [own / plain for own, plain in zip(steps[count], steps[0], strict=True)]
        yield BatchCost(count, 1e3 * median(steps[count]), median(ratios), compute_interval(ratios))


def take_turn(core: Core, grammar: str, constrained: int, options: argparse.Namespace, draw: random.Random) -> float:
    """Return the median seconds of a decode step, with `constrained` of the requests by the grammar."""
    vocab_size = core.model.info.vocab_size
    for i in range(options.streams):
        sampling = SamplingParams(options.steps + 8, temperature=1.0, seed=draw.randrange(2**32), ignore_eos=True)
        prompt = [draw.randrange(vocab_size) for _ in range(16)]
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
    return median(taken)


if __name__ == "__main__":
    sys.exit(main())
