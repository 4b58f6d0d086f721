"""The flags of `kvmux evaluate` that are no settings of the server. Imports nothing heavy: help comes at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DESCRIPTION = """\
Reads the same documents under several cache strategies, through the server's own engine, and reports what each one
loses against exact caching: perplexity, how often the likeliest token is the same, KL divergence, and how far back
an answer may stand and still be known."""

EPILOG = """\
The records are made by the project's own generator, about people and things the embedded model never met; they are
plain English, so any model that has learnt to look back can be asked. Running text is stories of the same generator,
or a file of yours (--text).

examples:
  kvmux evaluate
  kvmux evaluate --strategy contiguous --strategy sliding_window:window=64,sinks=0 --strategy sliding_window:window=256
  kvmux evaluate --model models/my-model --text book.txt --length 4096 --json report.json --plot report.png
"""


@dataclass(frozen=True)
class EvaluateOptions:
    """What to evaluate."""

    strategy: Sequence[str] = ()
    text: Path | None = None
    length: int | None = None
    texts: int = 8
    records: int = 24
    new_phrasings: bool = False
    row_tokens: int | None = None
    seed: str | None = None
    json: Path | None = None
    plot: Path | None = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of EvaluateOptions; those not given are left out, as those of settings are."""
    add = parser.add_argument_group("evaluation").add_argument
    add(
        "--strategy",
        action="append",
        metavar="NAME",
        help="instance to evaluate, or KIND:option=value,...; may be given several times (default: all instances)",
    )
    add("--text", type=Path, metavar="FILE", help="running text, read from its beginning (default: stories)")
    add("--length", type=_parse_positive, metavar="N", help="tokens of a document (default: the model's, at most 2048)")
    add(
        "--texts",
        type=_parse_positive,
        metavar="N",
        help=f"documents of running text (default: {EvaluateOptions.texts})",
    )
    add(
        "--records",
        type=_parse_positive,
        metavar="N",
        help=f"documents with answers to recall (default: {EvaluateOptions.records})",
    )
    add(
        "--new-phrasings",
        action="store_true",
        help="tell and ask the records in sentences, too, that the embedded model never met",
    )
    add(
        "--row-tokens",
        type=_parse_positive,
        metavar="N",
        help="tokens of a document that enter in a step; 1 is as in decoding (default, and at most: what fits)",
    )
    add("--seed", type=_parse_text, metavar="TEXT", help="other documents of the generator")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--plot", type=Path, metavar="FILE", help="draw them there: .png, .svg or .pdf; needs kvmux[evaluate]")


def _parse_positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _parse_text(text: str) -> str:
    if not text.isprintable():  # undecodable bytes of a command line are not, either
        raise argparse.ArgumentTypeError(f"{text!r} is not plain text")
    return text
