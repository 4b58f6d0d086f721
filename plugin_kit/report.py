"""Writes what came of checking a class, in words: each promise, and for broken ones what was expected and found."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from plugin_kit.cases import PluginCheck
from plugin_kit.promise import CheckCase, CheckOutcome

WIDTH = 110
MARKS = {"kept": "passed", "broken": "BROKEN", "not promised": "-"}


def run_cases(cases: Iterable[CheckCase], write: Callable[[str], None], name: str) -> list[CheckOutcome]:
    """Check cases, which are in the order of their promises, and write a paragraph for each promise."""
    outcomes: list[CheckOutcome] = []
    for promise, of_promise in groupby(cases, key=lambda case: case.promise):
        found = [case.find_outcome() for case in of_promise]
        outcomes += found
        write("\n".join(_format_promise(promise, found, name)))
    return outcomes


def _format_promise(promise: str, outcomes: list[CheckOutcome], name: str) -> Iterator[str]:
    broken = [outcome for outcome in outcomes if outcome.result == "broken"]
    result = "broken" if broken else "kept" if any(each.result == "kept" for each in outcomes) else "not promised"
    yield f"  {MARKS[result]:7} {promise}" + (" (not promised)" if result == "not promised" else "")
    if not broken:
        return
    yield _wrap("promise", outcomes[0].case.expected)
    firsts: dict[str, CheckOutcome] = {}  # by what was found; broken[0], which is repeated, is the first of them
    for outcome in broken:
        firsts.setdefault(outcome.found, outcome)
    for found in list(firsts.values())[:2]:
        yield _wrap("found", f"{found.found} (options: {found.case.options})")
    yield f"          repeat:  {format_command(name, broken[0].case)}"


def _wrap(title: str, text: str) -> str:
    indent = " " * 19
    lines = textwrap.wrap(text, WIDTH - len(indent), break_long_words=False)
    return f"{' ' * 10}{title + ':':9}" + f"\n{indent}".join(lines)


def format_command(name: str, case: CheckCase) -> str:
    """Return the command that checks a case again, with the same random numbers."""
    options = "{}" if case.options == "the defaults" else case.options
    words = ["kvmux", "strategy", "check", name, "--options", options, "-k", case.promise, "--seed", str(case.seed)]
    return shlex.join(words)


def format_head(check: PluginCheck) -> str:
    """Return what is checked."""
    what = "strategy" if check.is_strategy else "scorer"
    return f"{check.name}, a {what}, with {', '.join(variant.name for variant in check.variants)}; seed {check.seed}\n"


def format_end(outcomes: list[CheckOutcome], weakness: str | None) -> str:
    """Return the number of promises that are kept and broken, and why the checks prove little, if they do."""
    promises = {outcome.case.promise for outcome in outcomes if outcome.result != "not promised"}
    broken = {outcome.case.promise for outcome in outcomes if outcome.result == "broken"}
    lines = [f"\n{len(promises - broken)} promises are kept, {len(broken)} are broken."]
    lines += [textwrap.fill(f"Note: {weakness}.", WIDTH)] if weakness else []
    return "\n".join(lines)
