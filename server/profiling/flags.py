"""The flags of `kvmux profile` that are not settings of the server. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from config.quantities import parse_duration_flag

DESCRIPTION = """\
Shows where the time of a step goes, and how near it comes to the limits of this machine: each operation of the kernels,
the model's other work, sampling, scheduling, laying out the batch. Decoding is compared with the bytes that must be
read at the memory's bandwidth, prefill with its matrix products at the speed of large ones; both are measured in the
same run. `kvmux bench` measures what clients of a server see."""

EPILOG = """\
Figures are means over the fastest fifth of the steps, which other processes disturbed least.

examples:
  kvmux profile
  kvmux profile --model models/my-model --weights int8 --sequences 1 32 --context 2048
  kvmux profile --json profile.json
  KVMUX_ADMIN_TOKEN=... kvmux profile --url http://127.0.0.1:8000 --steps 50 --trace trace.json
"""


@dataclass(frozen=True)
class ProfileOptions:
    """The options of `kvmux profile`; each is a flag, described by its help text."""

    sequences: Sequence[int] = (1, 8, 16)
    context: int = 128
    prefill: int | None = None
    steps: int = 40
    kv_cache: str = "paged"
    json: Path | None = None
    url: str | None = None  # URL of a running server, whose steps are to be recorded
    seconds: float | None = None
    trace: Path = Path("kvmux-trace.json")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of ProfileOptions; flags that are not given are absent from the parsed options."""
    add = parser.add_argument_group("profile").add_argument
    add(
        "--sequences",
        type=_parse_positive,
        nargs="+",
        metavar="N",
        help="numbers of sequences to decode together; each number is profiled in turn (default: 1 8 16)",
    )
    add(
        "--context",
        type=_parse_positive,
        metavar="N",
        help=f"tokens in the cache of each sequence before it decodes (default: {ProfileOptions.context})",
    )
    add(
        "--prefill",
        type=_parse_positive,
        metavar="N",
        help="tokens of the prompt that a prefill step computes (default: as many as fit into one step)",
    )
    add(
        "--steps",
        type=_parse_positive,
        metavar="N",
        help=f"number of steps to measure or record (default: {ProfileOptions.steps})",
    )
    add("--kv-cache", metavar="NAME", help=f"cache strategy of all sequences (default: {ProfileOptions.kv_cache})")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file as JSON")
    _add_flags_of_recordings(parser.add_argument_group("profile of a running server").add_argument)


def _add_flags_of_recordings(add: Callable[..., object]) -> None:
    """Add the flags for recording steps of a running server."""
    add(
        "--url",
        metavar="URL",
        help="record the next steps of the server at this URL, with its --admin-token, instead of running steps here",
    )
    add(
        "--seconds",
        type=parse_duration_flag,
        metavar="DURATION",
        help="time after which a recording ends, even if it has fewer steps, in seconds or as 10s (default: 10)",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help=f"write the Chrome trace of a recording to this file (default: {ProfileOptions.trace})",
    )


def _parse_positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)
