"""`kvmux strategy`: checks a class (`check`), and writes a new package (`new`)."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from config.errors import SettingsError
from kernels.ops import Ops
from kernels.reference.backend import ReferenceOps
from plugin_kit.cases import PluginCheck, load_fastest_ops
from plugin_kit.new_package import write_package
from plugin_kit.report import format_end, format_head, run_cases


def check(options: Mapping[str, Any]) -> int:
    """Check a class and write a report; return 0 if it keeps all its promises, else 1. Raises SettingsError."""
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does; a console script does not
    # the report says what is wrong; without a handler, logging would write faults to stderr as well
    logging.getLogger("server.engine.instance").addHandler(logging.NullHandler())
    seed = options.get("seed", random.SystemRandom().randrange(1 << 32))
    found = PluginCheck(
        options["plugin"],
        seed,
        [parse_options(text) for text in options.get("options", ())],
        _make_reference_ops if options.get("reference") else load_fastest_ops,
    )
    words = options.get("words", "")
    cases = found.list_cases(words)
    if not cases:
        raise SettingsError(f"no promise has {words!r} in its name; without -k all are checked")
    _write(format_head(found))
    outcomes = run_cases(cases, _write, found.name)
    is_broken = any(outcome.result == "broken" for outcome in outcomes)
    _write(format_end(outcomes, None if is_broken or words else found.find_weakness()))
    return int(is_broken)


def _make_reference_ops() -> Ops:
    return ReferenceOps()


def parse_options(text: str) -> Mapping[str, Any]:
    """Return the options of an instance, given as JSON. Raises SettingsError if they are something else."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"--options {text}: this is not JSON ({error}); write it as '{{\"window\": 20}}'") from None
    if not isinstance(options, dict):
        raise SettingsError(f"--options {text}: this is not a JSON object; write it as '{{\"window\": 20}}'")
    return options


def _write(text: str) -> None:
    print(text, flush=True)


def new(options: Mapping[str, Any]) -> int:
    """Write a new package into the current folder, and say what to do next; return 0. Raises SettingsError."""
    folder = write_package(options["name"], Path.cwd(), is_scorer=bool(options.get("scorer")))
    files: Sequence[str] = sorted(str(file.relative_to(folder.parent)) for file in folder.rglob("*") if file.is_file())
    _write("\n".join(files))
    _write(f"\nNext: cd {folder.name}, read README.md, and run `pip install -e .[test]` and `pytest`.")
    return 0
