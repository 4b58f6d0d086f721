"""`python -m tools.bench.compression`: what each scorer of `compressed` costs in quality, at several budgets.

Each scorer reads the documents of `kvmux evaluate` with a half, a quarter and an eighth of the keys, in three ways:

- running text and records, with a boundary at every 256th token (KL divergence from exact caching, perplexity, recall);
- records with one question that the scorer has seen when it dropped keys, once in the text (recall);
- records with one question that came after the keys were dropped (recall).

There are two controls: `random` draws other keys in each head, and "random, same in all heads" draws tokens. Several
seeds generate other documents each, so that the figures have intervals. Needs matplotlib for --plot.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cache_strategies.scorers import list_scorers
from config.errors import SettingsError
from server.evaluation.command import evaluate, start_engine
from server.evaluation.flags import EvaluateOptions
from server.evaluation.report import StrategyResult
from tools.bench.compression.report import EXACT, RUNNING, SAME_TOKENS, SEEN, UNSEEN, Measurement, as_table, save_plot

# The options of a control for scorers that keep about the same tokens in all heads
DRAW_TOKENS = "random,scorer_options.per_head=false"
SHARES = (0.5, 0.25, 0.125)
LENGTH = 2048  # tokens of a document of running text
QUESTION_AT = 1024  # tokens before a question that the scorer has seen
LATER = 64  # tokens that follow before a question that the scorer has not seen
FAR = 256  # tokens; recall counts answers whose fact is farther back


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.compression", description=__doc__)
    add = parser.add_argument
    add("--model", default="tiny", help="as for `kvmux evaluate`")
    add("--scorer", action="append", help="scorer to measure; may be given several times (default: all)")
    add("--seeds", type=int, default=5, help="seeds, each for other documents (default: 5)")
    add("--texts", type=int, default=2, help="documents of running text for each seed (default: 2)")
    add(
        "--records", type=int, default=6, help="records for each seed; three times as many with a question (default: 6)"
    )
    add("--json", type=Path, required=True, help="file for the results")
    add("--plot", type=Path, help="file for a plot")
    options = parser.parse_args(arguments)
    try:
        measurements = list(measure(options))
    except SettingsError as error:
        parser.error(str(error))
    options.json.write_text(json.dumps([each._asdict() for each in measurements], indent=1) + "\n")
    print(as_table(measurements))
    if options.plot:
        save_plot(measurements, options.plot)
    return 0


def measure(options: argparse.Namespace) -> Iterator[Measurement]:
    """Yield the measurements of all scorers, budgets, tasks and seeds. Raises SettingsError."""
    scorers = options.scorer or [*sorted(list_scorers()), DRAW_TOKENS]
    running = EvaluateOptions(texts=options.texts, records=options.records, length=LENGTH)
    yield from measure_task(options, scorers, {}, {RUNNING: running})
    asked = EvaluateOptions(texts=1, records=3 * options.records, length=QUESTION_AT + 2 * LATER)
    tasks = {
        SEEN: replace(asked, question_at=QUESTION_AT),
        UNSEEN: replace(asked, question_at=QUESTION_AT + LATER),
    }
    yield from measure_task(options, scorers, {"every": QUESTION_AT}, tasks)


def measure_task(
    options: argparse.Namespace, scorers: Sequence[str], settings: dict[str, Any], tasks: dict[str, EvaluateOptions]
) -> Iterator[Measurement]:
    """Yield the measurements of these tasks, which have one engine; `settings` are options of `compressed`."""
    given = "".join(f",{name}={value}" for name, value in settings.items())
    wanted = [f"compressed:scorer={scorer},budget={share}{given}" for scorer in scorers for share in SHARES]
    engine, names = start_engine(None, {"model": options.model}, replace(next(iter(tasks.values())), strategy=wanted))
    for task, asked in tasks.items():
        for seed in range(options.seeds):
            print(f"{task}, seed {seed + 1} of {options.seeds}", file=sys.stderr)
            report = evaluate(engine, names, replace(asked, seed=f"compression {seed}"))
            yield from (describe(task, seed, result) for result in report.results)


def describe(task: str, seed: int, result: StrategyResult) -> Measurement:
    """Return the figures of one strategy for one seed."""
    right, asked = result.records.recall(1 if task != RUNNING else FAR + 1, 1 << 30)
    text = result.text
    scorer = result.options.get("scorer", EXACT)
    draws_tokens = str(result.options.get("scorer_options", {}).get("per_head")).lower() == "false"
    return Measurement(
        SAME_TOKENS if draws_tokens else scorer,
        result.options.get("budget", 1.0),
        task,
        seed,
        text.perplexity,
        text.kl,
        result.records.kl,
        right,
        asked,
    )


if __name__ == "__main__":
    sys.exit(main())
