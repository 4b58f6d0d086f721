"""The flags of `kvmux profile` that are not settings of the server. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from config.flags import COUNT, DURATION, FILE, Kind, add_flags, flag

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
class _RecordingOptions:
    url: str | None = flag(
        None,
        Kind("URL"),
        "record the next steps of the server at this URL, with its --admin-token, instead of running steps here",
    )
    seconds: float | None = flag(
        None,
        DURATION,
        "time after which a recording ends, even if it has fewer steps, in seconds or as 10s (default: 10)",
    )
    trace: Path = flag(Path("kvmux-trace.json"), FILE, "write the Chrome trace of a recording to this file")


@dataclass(frozen=True)
class _StepOptions:
    sequences: Sequence[int] = flag(
        (1, 8, 16),
        COUNT,
        "numbers of sequences to decode together; each number is profiled in turn (default: 1 8 16)",
        nargs="+",
    )
    context: int = flag(128, COUNT, "tokens in the cache of each sequence before it decodes")
    prefill: int | None = flag(
        None, COUNT, "tokens of the prompt that a prefill step computes (default: as many as fit into one step)"
    )
    steps: int = flag(40, COUNT, "number of steps to measure or record")
    kv_cache: str = flag("paged", Kind("NAME"), "cache strategy of all sequences")
    json: Path | None = flag(None, FILE, "write the figures to this file as JSON")


@dataclass(frozen=True)
class ProfileOptions(_RecordingOptions, _StepOptions):
    """The options of `kvmux profile`, each of which is a flag."""


def add_profile_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; those that are not given are absent from the parsed options."""
    add_flags(parser, "profile", _StepOptions)
    add_flags(parser, "profile of a running server", _RecordingOptions)
