"""Compares how fast tokens are decoded under several cache strategies; `python -m tools.bench decoding --help`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from config.settings import Settings, load_settings
from server.engine.build import Engine, build_engine
from server.evaluation.command import select_strategies
from tools.bench.decode_steps import WARMUP_STEPS, take_turn
from tools.bench.models import LLAMA, SHAPES, find_model
from tools.bench.runner import Case, Context, Effort, Group, Reading, Row, Table

STRATEGIES = ("paged", "compressed:budget=0.5", "compressed:budget=0.25")
STEP, COMMITS = Row("a step", "ms"), Row("commits and compactions of a sequence in a turn", "ms")
KV_MEMORY = Row("KV memory of all sequences", "MiB")


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        default=LLAMA.name,
        help=f"as for `kvmux serve`, or one of {', '.join(SHAPES)}: a model of that shape with random weights "
        f"(default: {LLAMA.name})",
    )
    add("--dtype", default="auto", help="as for `kvmux serve`")
    add("--threads", type=int, help="CPU threads (default: as `kvmux serve` chooses)")
    add(
        "--strategy",
        action="append",
        help="as for `kvmux evaluate`; may be given several times, and the others are compared with the first "
        f"(default: {', '.join(STRATEGIES)})",
    )
    add("--sequences", type=int, nargs="+", default=[1, 8], help="numbers of sequences decoded together (default: 1 8)")
    add("--context", type=int, default=2048, help="tokens of a sequence at the start of a turn (default: 2048)")
    add("--steps", type=int, default=256, help="steps of a turn that are measured (default: 256)")
    add("--kv-memory", default="auto", help="as for `kvmux serve`")


def list_cases(context: Context) -> Iterator[Case]:
    """Yield a case for each number of sequences. Raises SettingsError."""
    options = context.options
    settings = make_settings(options, context)
    names = list(settings.strategies)
    set_up = partial(run_engine, settings)
    for sequences in options.sequences:
        title = f"{sequences} sequences of {options.context:,} tokens"
        measure = partial(_measure, options, sequences)
        yield Case(title, Table(title, base=names[0], compares_others=True), measure, names, set_up, warm_ups=1)


def make_settings(options: Namespace, context: Context) -> Settings:
    """Return the settings of an engine with the strategies. Raises SettingsError."""
    flags = {
        "model": str(find_model(options.model, context.show_status)),
        "dtype": options.dtype,
        "threads": options.threads,
        "kv_memory": options.kv_memory,
        "max_num_seqs": max(options.sequences),
        "max_seq_len": options.context + WARMUP_STEPS + options.steps,
    }
    settings = load_settings(None, {name: value for name, value in flags.items() if value is not None})
    return use_strategies(settings, options.strategy or STRATEGIES)


def use_strategies(settings: Settings, wanted: Sequence[str]) -> Settings:
    """Return settings with these strategies, each of which may use all memory. Raises SettingsError."""
    selected = select_strategies(settings, wanted)
    whole = {name: each.model_copy(update={"floor": "0%", "limit": "100%"}) for name, each in selected.items()}
    return settings.model_copy(update={"strategies": whole, "default_strategy": next(iter(whole)), "rules": []})


@contextmanager
def run_engine(settings: Settings) -> Iterator[Engine]:
    """Yield an engine. Raises SettingsError."""
    yield build_engine(settings)


def _measure(options: Namespace, sequences: int, engine: Engine, strategy: str) -> Iterator[Reading]:
    """Decode sequences under one strategy. Raises SettingsError for lack of memory."""
    model = engine.core.model
    # Each sequence has tokens of its own, so that none shares memory with another one.
    generator = torch.Generator().manual_seed(sequences)
    prompts = torch.randint(model.info.vocab_size, (sequences, options.context), generator=generator).tolist()
    turn = take_turn(model, engine.core.instances[strategy], prompts, options.steps)
    yield Reading(STEP, 1e3 * turn.total / options.steps)
    yield Reading(COMMITS, 1e3 * turn.commits / sequences)
    yield Reading(KV_MEMORY, turn.kv_bytes / 2**20)


GROUP = Group(
    """\
Measures decode steps: the forward pass of the model over one new token of each sequence, and what the strategy does
after it, such as the compactions of `compressed`. Drawing tokens, scheduling and HTTP are left out.

In its turn a strategy gets sequences of --context tokens, the same ones as the other strategies, and decodes --steps
tokens of each, after a few that are not counted. With 256 steps, `compressed` with its default options compacts each
sequence once. Prompts are not computed: keys and values are random numbers, since the time of a step hardly depends on
them.""",
    list_cases,
    add_arguments,
    Effort(7),
)
