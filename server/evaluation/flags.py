"""The flags of `kvmux evaluate` beside the server's settings. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from config.flags import COUNT, FILE, SWITCH, Kind, flag, number_flag

DESCRIPTION = """\
Runs the same documents under several cache strategies, with the server's own engine, and reports how each differs
from exact caching: perplexity, share of tokens with the same top-1 token, KL divergence, and recall of answers by
their distance in the text. With --suite it also asks questions about long texts under each strategy, and says whether
the answers are the same, worse, or whether more samples are needed."""

EPILOG = """\
Records are texts in plain English that state facts and later ask for them; their names do not occur in the embedded
model's training, and other models can answer, too. Running text is stories in the same words, or a file of yours
(--text). Records and stories come with kvmux.

examples:
  kvmux evaluate
  kvmux evaluate --strategy contiguous --strategy sliding_window:window=64,sinks=0 --strategy sliding_window:window=256
  kvmux evaluate --strategy my_package:MyCache:window=256 --strategy compressed:scorer=my_package:MyScorer,budget=0.25
  kvmux evaluate --model models/my-model --strategy small --suite ruler --suite tool_calls --length 4096
  kvmux evaluate --model models/my-model --board boards/my-model --lengths 1024 4096
  kvmux evaluate --model models/my-model --text book.txt --length 4096 --json report.json --plot report.png
"""


def _parse_text(text: str) -> str:
    if not text.isprintable():  # false for control characters and for what is not UTF-8
        raise argparse.ArgumentTypeError(f"{text!r} is not printable text")
    return text


_TEXT = Kind("TEXT", _parse_text)
_POINTS = Kind("POINTS", number_flag(float, "a number above 0 and below 100", lambda number: 0 < number < 100))
_AMOUNT = Kind("N", number_flag(int, "a whole number from 0", lambda number: number >= 0))


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of `kvmux evaluate`, each of which is a flag."""

    strategy: Sequence[str] = flag(
        (),
        Kind("NAME"),
        "instance to evaluate, or KIND:option=value,..., whose KIND may be a class, MODULE:CLASS; may be given "
        "several times (default: all instances). An option of a table is written with a dot: "
        "compressed:scorer=random,scorer_options.per_head=false",
        action="append",
    )
    text: Path | None = flag(None, FILE, "file with running text, read from its start (default: stories)")
    length: int | None = flag(
        None,
        COUNT,
        "tokens of a document (default: the model's context, at most 2048); more than the context if all "
        "strategies are of kind streaming: the first of them is then what the others are compared with",
    )
    texts: int = flag(8, COUNT, "most documents of running text; stories fill 24 of 2,048 tokens")
    last: int | None = flag(
        None,
        COUNT,
        "count only the last N tokens of each document of running text; they have read the others",
    )
    records: int = flag(24, _AMOUNT, "most documents with answers to recall; there are 56; 0: none")
    question_at: int | None = flag(
        None,
        COUNT,
        "end each record with one question, whose last token follows N others: if `compressed` drops keys after "
        "N tokens (a multiple of its option `every`), its scorer has seen the question",
    )
    new_phrasings: bool = flag(
        False, SWITCH, "state the facts of records in sentences that the embedded model was not trained on"
    )
    row_tokens: int | None = flag(
        None,
        COUNT,
        "tokens of a document to compute in one step; 1 is as in decoding (default and maximum: as many as fit)",
    )
    seed: str | None = flag(None, _TEXT, "draw another order of stories and records by this seed")
    json: Path | None = flag(None, FILE, "write the results to this file as JSON")
    plot: Path | None = flag(None, FILE, "plot the results to this .png, .svg or .pdf; needs kvmux[evaluate]")
    suite: Sequence[str] = flag(
        (),
        Kind("NAME"),
        "suite to run besides the texts: ruler, scbench, tool_calls or all, or one task; may be given several times",
        action="append",
    )
    quick: bool = flag(
        False,
        SWITCH,
        "run few texts and, without --suite, four tasks; the defaults are then 26 samples of 1024 tokens",
    )
    samples: int | None = flag(None, COUNT, "samples of each task of a suite (default: 40)")
    margin: float = flag(10.0, _POINTS, "points of 100 within which a strategy counts as the same as exact caching")
    query_aware: bool = flag(
        False, SWITCH, "let strategies see the question before they drop keys at its end; otherwise only the context"
    )

    board: Path | None = flag(
        None,
        Kind("FOLDER", Path),
        "measure strategies x lengths: answers (--suite, default: quick), KL, memory and speed, into board.json, "
        "board.md and board.html of this folder; the same command again goes on after an interruption",
    )
    lengths: Sequence[int] = flag(
        (), COUNT, "tokens of the texts of --board (default: 1024 4096 where the model has room)", nargs="+"
    )

    @property
    def has_suites(self) -> bool:
        return bool(self.suite) or self.quick or self.board is not None
