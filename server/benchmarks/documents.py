"""Puts what a program printed between two marks of a document, so that figures are measured and not copied."""

from __future__ import annotations

import re

TABLES = "make bench"
PROFILE = "kvmux profile"
GROWTH = "python -m server.benchmarks.growth"


def replaced(document: str, printed_by: str, text: str) -> str:
    """The document, with `text` where it has what that program printed. Raises ValueError if it has no such place."""
    begin, end = f"<!-- printed by {printed_by} -->", f"<!-- end of {printed_by} -->"
    found = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not found.search(document):
        raise ValueError(f"the document has no place for it: {begin} and {end}")
    return found.sub(lambda _: f"{begin}\n{text}\n{end}", document)
