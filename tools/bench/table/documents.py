"""Puts what programs print between marks of the documents, so that figures there are measured and not copied."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from server.profiling.running import printed
from tools.bench.table.models import LLAMA, QWEN, made

BENCHMARKS, PERFORMANCE, PICTURE = "benchmarks.md", "performance.md", "img/growth.png"
TABLES = "make bench"
GROWTH = "python -m tools.bench.growth"
PROFILES = {shape: f"kvmux profile, {shape.name}" for shape in (QWEN, LLAMA)}


def renewed(docs: Path, models: Path, tell: Callable[[str], None]) -> None:
    """Measures all that performance.md shows. Raises RunError, OSError, and ValueError if it has no place for it."""
    document = docs / PERFORMANCE
    for shape, mark in PROFILES.items():
        tell(mark)
        put(document, mark, printed("server", "profile", "--model", str(made(shape, models, tell))))
    tell("what grows with what")
    grown = ("--model", str(made(QWEN, models, tell)), "--plot", str(docs / PICTURE))
    put(document, GROWTH, printed("tools.bench.growth", *grown))


def put(file: Path, mark: str, text: str) -> None:
    """Into the file's place for it. Raises OSError and ValueError."""
    file.write_text(replaced(file.read_text(), mark, text.strip()))


def replaced(document: str, mark: str, text: str) -> str:
    """The document, with `text` where it has what is printed by that. Raises ValueError if it has no such place."""
    begin, end = f"<!-- printed by {mark} -->", f"<!-- end of {mark} -->"
    found = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not found.search(document):
        raise ValueError(f"the document has no place for it: {begin} and {end}")
    return found.sub(lambda _: f"{begin}\n{text}\n{end}", document)
