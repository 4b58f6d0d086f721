"""`python -m tools.bench.decoding`: how fast tokens are decoded under several cache strategies.

Measures decode steps: the forward pass of the model over one new token of each sequence, and what the strategy does
after it, such as the compactions of `compressed`. Drawing tokens, scheduling and HTTP are left out.

The strategies take turns, in reverse order in every second round, as other work disturbs the machine. In its turn a
strategy gets sequences of --context tokens, the same ones as the other strategies, and decodes --steps tokens of each,
after a few that are not counted. With 256 steps, `compressed` with its default options compacts each sequence once.
The table compares each strategy with the first one: the median over the rounds of the ratio of their times in one
round (2: twice as fast), and the interval that contains the true median with a probability of 95 %. "KV memory" is that
of all sequences at the end of a turn, "commits and compactions" the time of these for one sequence in a turn.

Prompts are not computed: the memory is filled with random numbers, since the time of a step does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from config.errors import SettingsError
from config.settings import load_settings
from server.engine.build import Engine, build_engine
from server.evaluation.command import select_strategies
from tools.bench.decoding.steps import WARMUP_STEPS, Turn, fill_at_random, take_turn
from tools.bench.table.models import LLAMA, SHAPES, cache_folder, make_model
from tools.compare_checkouts import compute_interval

STRATEGIES = ("paged", "compressed:budget=0.5", "compressed:budget=0.25")
TABLE_HEAD = (
    "| sequences | strategy | KV memory | a step | commits and compactions | times faster | 95 % |\n"
    "|---:|---|---:|---:|---:|---:|---:|"
)


class DecodingSpeed(NamedTuple):
    """The decode speed of one strategy at one number of sequences."""

    strategy: str
    sequences: int
    context: int
    step_ms: float
    compaction_ms: float  # of one sequence, and of committing the tokens of a turn
    kv_bytes: int  # in use by all sequences at the end of a turn
    speedup: float  # over the first strategy, the median over the rounds
    speedup_interval: tuple[float, float]  # 95 %


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        engine, names = build(options)
        if not options.json:
            print(TABLE_HEAD)
        for sequences in options.sequences:
            for speed in measure(engine, names, sequences, options):
                print(json.dumps(speed._asdict()) if options.json else format_row(speed), flush=True)
    except SettingsError as error:
        parser.error(str(error))
    return 0


def make_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.decoding", description=__doc__, formatter_class=formatter
    )
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
    add("--rounds", type=int, default=7, help="rounds in which each strategy has a turn, after one to warm up")
    add("--kv-memory", default="auto", help="as for `kvmux serve`")
    add("--json", action="store_true", help="print a JSON line for each strategy instead of a table")
    return parser


def build(options: argparse.Namespace) -> tuple[Engine, Sequence[str]]:
    """Build an engine with the strategies; return it and their names. Raises SettingsError."""
    flags = {
        "model": str(find_model(options.model)),
        "dtype": options.dtype,
        "threads": options.threads,
        "kv_memory": options.kv_memory,
        "max_num_seqs": max(options.sequences),
        "max_seq_len": options.context + WARMUP_STEPS + options.steps,
    }
    settings = load_settings(None, {name: value for name, value in flags.items() if value is not None})
    strategies = select_strategies(settings, options.strategy or STRATEGIES)
    names = list(strategies)
    whole = {name: each.model_copy(update={"floor": "0%", "limit": "100%"}) for name, each in strategies.items()}
    return build_engine(
        settings.model_copy(update={"strategies": whole, "default_strategy": names[0], "rules": []})
    ), names


def find_model(name: str) -> str | Path:
    """Return the folder of a model with random weights, made if needed, or the name of another model as it is."""
    if name not in SHAPES:
        return name
    return make_model(SHAPES[name], cache_folder(), lambda status: print(status, file=sys.stderr))


# ---------------------------------------------------------------- measuring
def measure(
    engine: Engine, names: Sequence[str], sequences: int, options: argparse.Namespace
) -> Iterator[DecodingSpeed]:
    """Yield the speed of each strategy; the first round is a warm-up. Raises SettingsError for lack of memory."""
    caches = [engine.core.instances[name] for name in names]
    fill_at_random(caches[0])
    # Each sequence has tokens of its own, so that none shares memory with another one.
    prompts = torch.randint(engine.core.model.info.vocab_size, (sequences, options.context)).tolist()
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for i in range(options.rounds + 1):
        for cache in caches[:: 1 if i % 2 else -1]:
            turns[cache.name].append(take_turn(engine.core.model, cache, prompts, options.steps))
        show_progress(f"sequences: {sequences}, {f'round {i} of {options.rounds}' if i else 'warm-up'}", turns, options)
    for name in names:
        yield summarize(name, turns[name][1:], turns[names[0]][1:], sequences, options)


def show_progress(round_name: str, turns: Mapping[str, Sequence[Turn]], options: argparse.Namespace) -> None:
    """Print the milliseconds of a step of each strategy in its latest turn."""
    steps = ", ".join(f"{name} {1e3 * of_name[-1].total / options.steps:.2f} ms" for name, of_name in turns.items())
    print(f"{round_name}: {steps}", file=sys.stderr, flush=True)


def summarize(
    name: str, turns: Sequence[Turn], base: Sequence[Turn], sequences: int, options: argparse.Namespace
) -> DecodingSpeed:
    """Return the speed of a strategy from its turns and those of the first strategy in the same rounds."""
    ratios = [theirs.total / own.total for theirs, own in zip(base, turns, strict=True)]
    return DecodingSpeed(
        name,
        sequences,
        options.context,
        1e3 * median(turn.total for turn in turns) / options.steps,
        1e3 * median(turn.commits for turn in turns) / sequences,
        turns[-1].kv_bytes,
        median(ratios),
        compute_interval(ratios),
    )


def format_row(speed: DecodingSpeed) -> str:
    """Return a line of the table in Markdown."""
    low, high = speed.speedup_interval
    return (
        f"| {speed.sequences} | `{speed.strategy}` | {speed.kv_bytes / 2**20:,.1f} MiB | {speed.step_ms:.2f} ms "
        f"| {speed.compaction_ms:.1f} ms | {speed.speedup:.2f} | {low:.2f} to {high:.2f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
