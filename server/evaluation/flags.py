"""The flags of `kvmux evaluate` beside the server's settings. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DESCRIPTION = """\
Runs the same documents under several cache strategies, with the server's own engine, and reports how each differs
from exact caching: perplexity, share of tokens with the same top-1 token, KL divergence, and recall of answers by
their distance in the text."""

EPILOG = """\
Records are texts in plain English that state facts and later ask for them; their names do not occur in the embedded
model's training, and other models can answer, too. Running text is stories in the same words, or a file of yours
(--text). Records and stories come with kvmux.

examples:
  kvmux evaluate
  kvmux evaluate --strategy contiguous --strategy sliding_window:window=64,sinks=0 --strategy sliding_window:window=256
  kvmux evaluate --strategy my_package:MyCache:window=256 --strategy compressed:scorer=my_package:MyScorer,budget=0.25
  kvmux evaluate --model models/my-model --text book.txt --length 4096 --json report.json --plot report.png
"""


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of `kvmux evaluate`; each is a flag, described by its help text."""

    strategy: Sequence[str] = ()
    text: Path | None = None
    length: int | None = None
    texts: int = 8
    records: int = 24
    question_at: int | None = None
    new_phrasings: bool = False
    row_tokens: int | None = None
    seed: str | None = None
    json: Path | None = None
    plot: Path | None = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of EvaluateOptions."""
    add = parser.add_argument_group("evaluation").add_argument
    add(
        "--strategy",
        action="append",
        metavar="NAME",
        help="instance to evaluate, or KIND:option=value,..., whose KIND may be a class, MODULE:CLASS; may be given "
        "several times (default: all instances). An option of a table is written with a dot: "
        "compressed:scorer=random,scorer_options.per_head=false",
    )
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="file with running text, read from its start (default: stories)",
    )
    add(
        "--length",
        type=_parse_positive,
        metavar="N",
        help="tokens of a document (default: the model's context, at most 2048); more than the context if all "
        "strategies are of kind streaming: the first of them is then what the others are compared with",
    )
    add(
        "--texts",
        type=_parse_positive,
        metavar="N",
        help=f"most documents of running text (default: {EvaluateOptions.texts}); stories fill 24 of 2,048 tokens",
    )
    add(
        "--records",
        type=_parse_positive,
        metavar="N",
        help=f"most documents with answers to recall (default: {EvaluateOptions.records}); there are 56",
    )
    add(
        "--question-at",
        type=_parse_positive,
        metavar="N",
        help="end each record with one question, whose last token follows N others: if `compressed` drops keys after "
        "N tokens (a multiple of its option `every`), its scorer has seen the question",
    )
    add(
        "--new-phrasings",
        action="store_true",
        help="state the facts of records in sentences that the embedded model was not trained on",
    )
    add(
        "--row-tokens",
        type=_parse_positive,
        metavar="N",
        help="tokens of a document to compute in one step; 1 is as in decoding (default and maximum: as many as fit)",
    )
    add("--seed", type=_parse_text, metavar="TEXT", help="draw another order of stories and records by this seed")
    add("--json", type=Path, metavar="FILE", help="write the results to this file as JSON")
    add("--plot", type=Path, metavar="FILE", help="plot the results to this .png, .svg or .pdf; needs kvmux[evaluate]")


def _parse_positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _parse_text(text: str) -> str:
    if not text.isprintable():  # false for control characters and for what is not UTF-8
        raise argparse.ArgumentTypeError(f"{text!r} is not printable text")
    return text
