"""Options of a command, written as arguments and read again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from config.flags import COUNT, FILE, SWITCH, Kind, add_flags, flag, format_flags


@dataclass(frozen=True)
class Options:
    """Options of each kind."""

    names: Sequence[str] = flag((), Kind("NAME"), "some", action="append")
    sizes: Sequence[int] = flag((), COUNT, "some", nargs="+")
    some_file: Path | None = flag(None, FILE, "a file")
    quick: bool = flag(False, SWITCH, "off")
    slow: bool = flag(True, SWITCH, "on")


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (Options(), []),
        (Options(names=["a", "b c"], sizes=[1, 2]), ["--names", "a", "--names", "b c", "--sizes", "1", "2"]),
        (Options(some_file=Path("f"), quick=True, slow=False), ["--some-file", "f", "--quick", "--no-slow"]),
    ],
)
def test_options_are_read_as_they_were_written(options: Options, arguments: list[str]) -> None:
    assert format_flags(options) == arguments
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    add_flags(parser, "options", Options)
    assert Options(**vars(parser.parse_args(arguments))) == options
