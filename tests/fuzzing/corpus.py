"""Failing examples as files that can be committed: a folder for each test. Knows hypothesis' database, and no test.

Hypothesis' own directory forgets an example as soon as it passes or the test's source changes; this one keeps it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hypothesis.database import ExampleDatabase

KEPT = Path(__file__).parent / "corpus"
LONGEST_NAME = 80  # characters of a folder
WORKING = (b".secondary", b".pareto")  # ends of the keys of what hypothesis notes for itself while it shrinks


class Corpus(ExampleDatabase):
    """Examples of the test that runs, whatever hypothesis' key for it: that changes with the test's source.

    Files that cannot be written or removed are no error, as in hypothesis' own directories.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def fetch(self, key: bytes) -> Iterable[bytes]:
        """Return the examples of the test that runs."""
        if key.endswith(WORKING):
            return []
        return [file.read_bytes() for file in sorted(self._folder().glob("*")) if file.is_file()]

    def save(self, key: bytes, value: bytes) -> None:
        """Keep a failing example."""
        if not key.endswith(WORKING):
            file = self._file(value)
            with suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(value)

    def delete(self, key: bytes, value: bytes) -> None:
        """Keep the example: hypothesis deletes one that passes, which is a regression test from then on."""

    def move(self, src: bytes, dest: bytes, value: bytes) -> None:
        """Remove an example: hypothesis moves one away when it has found a smaller one that fails alike."""
        if not src.endswith(WORKING):
            with suppress(OSError):
                self._file(value).unlink()

    def _file(self, value: bytes) -> Path:
        return self._folder() / hashlib.sha256(value).hexdigest()[:16]

    def _folder(self) -> Path:
        test, _, _ = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")  # "path::name (call)"
        return self._directory / folder_name(test)


def folder_name(test: str) -> str:
    """Return the folder of a test's id: readable, and no two tests share one."""
    readable = re.sub(r"\W+", "_", test.removeprefix("tests/")).strip("_")
    return f"{readable[:LONGEST_NAME]}-{hashlib.sha256(test.encode()).hexdigest()[:8]}"
