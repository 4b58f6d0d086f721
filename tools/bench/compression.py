"""Measures what each scorer of `compressed` costs in quality; `python -m tools.bench compression --help`."""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from cache_strategies.scorers import list_scorers
from server.engine.build import Engine
from server.evaluation.command import evaluate, start_engine
from server.evaluation.flags import EvaluateOptions
from server.evaluation.report import StrategyResult
from tools.bench.compression_plot import draw
from tools.bench.runner import Case, Context, Effort, Group, Reading, Row, Table

# The options of a control for scorers that keep about the same tokens in all heads
DRAW_TOKENS = "random,scorer_options.per_head=false"
SAME_TOKENS, EXACT = "random, same in all heads", "exact"
SHARES = (0.5, 0.25, 0.125)
LENGTH = 2048  # tokens of a document of running text
QUESTION_AT = 1024  # tokens before a question that the scorer has seen
LATER = 64  # tokens that follow before a question that the scorer has not seen
FAR = 256  # tokens; recall counts answers whose fact is farther back
RUNNING, SEEN, UNSEEN = "running text", "question seen", "question not seen"
TITLE = "scorers"
PERPLEXITY, TEXT_KL, RECORDS_KL = Row("perplexity of stories", digits=4), Row("KL of stories"), Row("KL of records")
RECALL = {
    RUNNING: Row("recall", "%", False),
    SEEN: Row("recall, question seen", "%", False),
    UNSEEN: Row("recall, question not seen", "%", False),
}


@dataclass
class Evaluation:
    """An engine with all scorers, and the number of turns that each task has had: each has other documents."""

    engine: Engine
    names: Sequence[str]  # of instances, the exact one first
    turns: Counter[str]


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="tiny", help="as for `kvmux evaluate`")
    add("--scorer", action="append", help="scorer to measure; may be given several times (default: all)")
    add("--texts", type=int, default=2, help="documents of running text for each turn (default: 2)")
    add(
        "--records", type=int, default=6, help="records for each turn; three times as many with a question (default: 6)"
    )


def list_cases(context: Context) -> Iterator[Case]:
    """Yield a case for each way of reading documents, whose variants are the scorers with each share of the keys."""
    options = context.options
    scorers = options.scorer or [*sorted(list_scorers()), DRAW_TOKENS]
    running = EvaluateOptions(texts=options.texts, records=options.records, length=LENGTH)
    asked = EvaluateOptions(texts=1, records=3 * options.records, length=QUESTION_AT + 2 * LATER)
    seen = replace(asked, question_at=QUESTION_AT)
    unseen = replace(asked, question_at=QUESTION_AT + LATER)
    for more, tasks in (("", {RUNNING: running}), (f",every={QUESTION_AT}", {SEEN: seen, UNSEEN: unseen})):
        wanted = [f"compressed:scorer={scorer},budget={share}{more}" for share in SHARES for scorer in scorers]
        set_up = partial(_start, options.model, wanted, next(iter(tasks.values())))
        for task, documents in tasks.items():
            table, measure = Table(TITLE, variants_are_rows=True), partial(_measure, task, documents)
            yield Case(task, table, measure, set_up=set_up, is_timed=False)


@contextmanager
def _start(model: str, wanted: Sequence[str], options: EvaluateOptions) -> Iterator[Evaluation]:
    """Yield an engine with these strategies and an exact one. Raises SettingsError."""
    engine, names = start_engine(None, {"model": model}, replace(options, strategy=wanted))
    yield Evaluation(engine, names, Counter())


def _measure(task: str, options: EvaluateOptions, subject: Evaluation, _: str) -> Iterator[Reading]:
    """Read the documents of another seed under all strategies in one batch."""
    subject.turns[task] += 1
    report = evaluate(subject.engine, subject.names, replace(options, seed=f"compression {subject.turns[task] - 1}"))
    for result in report.results:
        yield from _read_result(task, result)


def _read_result(task: str, result: StrategyResult) -> Iterator[Reading]:
    """Yield the figures of one strategy."""
    variant, text, records = _name_variant(result), result.text, result.records
    right, asked = records.recall(1 if task != RUNNING else FAR + 1, 1 << 30)
    if task == RUNNING:
        figures = {PERPLEXITY: text.perplexity, TEXT_KL: text.kl, RECORDS_KL: records.kl}
        yield from (Reading(row, value, variant=variant) for row, value in figures.items())
    yield Reading(RECALL[task], 100 * right / asked, variant=variant)


def _name_variant(result: StrategyResult) -> str:
    """Return the share of the keys that stay, and the scorer."""
    draws_tokens = str(result.options.get("scorer_options", {}).get("per_head")).lower() == "false"
    scorer = SAME_TOKENS if draws_tokens else result.options.get("scorer", EXACT)
    return f"{result.options.get('budget', 1.0):.1%}, {scorer}"


GROUP = Group(
    """\
Each scorer reads the documents of `kvmux evaluate` with a half, a quarter and an eighth of the keys, in three ways:
running text and records with a boundary at every 256th token; records with one question that the scorer has seen when
it dropped keys; and records with one question that came after the keys were dropped.

There are two controls: `random` draws other keys in each head, and "random, same in all heads" draws tokens. Each turn
has other documents, so that the figures have intervals.""",
    list_cases,
    add_arguments,
    Effort(5),
    draw=draw,
)
