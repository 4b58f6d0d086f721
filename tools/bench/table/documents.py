"""Writes the output of benchmarks into marked sections of the documents, so that no figure is copied by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tools.bench.table.models import LLAMA, QWEN, make_model
from tools.server_process import run_module

BENCHMARKS, PERFORMANCE, PICTURE = "benchmarks.md", "performance.md", "img/growth.png"
TABLES = "make bench"
GROWTH = "python -m tools.bench.growth"
GROWTH_MEMORY = "8GiB"  # mirrored needs 7 GiB for 128 sequences of 512 tokens
PROFILES = {shape: f"kvmux profile, {shape.name}" for shape in (QWEN, LLAMA)}


def update_performance_doc(docs: Path, models: Path, show_status: Callable[[str], None]) -> None:
    """Measure and write all figures in performance.md. Raises RunError, OSError, ValueError for a missing section."""
    document = docs / PERFORMANCE
    for shape, mark in PROFILES.items():
        show_status(mark)
        update_section(
            document, mark, run_module("server", "profile", "--model", str(make_model(shape, models, show_status)))
        )
    show_status("growth of costs")
    growth_flags = ("--kv-memory", GROWTH_MEMORY, "--models", str(models), "--plot", str(docs / PICTURE))
    update_section(document, GROWTH, run_module("tools.bench.growth", *growth_flags))


def update_section(file: Path, mark: str, text: str) -> None:
    """Replace the section `mark` of a file with a text. Raises OSError, and ValueError if there is no such section."""
    file.write_text(replace_section(file.read_text(), mark, text.strip()))


def replace_section(document: str, mark: str, text: str) -> str:
    """Return the document with `text` in the section of the program `mark`. Raises ValueError if there is none."""
    begin, end = f"<!-- printed by {mark} -->", f"<!-- end of {mark} -->"
    found = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not found.search(document):
        raise ValueError(f"the document has no section between {begin} and {end}: add both lines")
    return found.sub(lambda _: f"{begin}\n{text}\n{end}", document)
