"""tools.sample_docstrings finds every kind of text, and draws the same ones for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.sample_docstrings import PRODUCT, ROOT, Text, collect, draw, main

PYTHON = '''"""The module."""
import logging

log = logging.getLogger(__name__)
SIZE = 4  # bytes that one entry takes here
# A comment that goes on
# over two whole lines.


class Box(dict[str, int]):
    """A box."""

    def put(self, count: int = 1, *, name: str) -> bool:
        """Put something in."""

        def check() -> None:
            """Check the count."""

        if count < 0:  # noqa: PLR2004 -- never shown here at all
            raise ValueError(f"count is {count}: give a number " "above 0")
        log.warning("the box %s is full now", name)
        return count > 1  # too short
'''
C = """// Adds numbers, one lane
// at a time.
float add(float x);  /* the sum of all lanes */
const char* url = "http://not.a/comment in a string";
int n;  // short
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in {"kernels/box.py": PYTHON, "kernels/cpu/add.metal": C, "tools/x.py": PYTHON}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_texts_of_a_small_checkout(root: Path) -> None:
    box, add = "kernels/box.py", "kernels/cpu/add.metal"
    assert collect(root, ["kernels"]) == [
        Text(box, 1, "docstring", "The module.", "kernels.box"),
        Text(box, 5, "comment", "bytes that one entry takes here", "SIZE = 4"),
        Text(box, 6, "comment", "A comment that goes on\nover two whole lines."),
        Text(box, 11, "docstring", "A box.", "kernels.box.Box(dict[str, int])"),
        Text(
            box,
            14,
            "docstring",
            "Put something in.",
            "kernels.box.Box.put(self, count: int=1, *, name: str) -> bool",
        ),
        Text(box, 17, "docstring", "Check the count.", "kernels.box.Box.put.check() -> None"),
        Text(box, 20, "message", "count is {...}: give a number above 0"),
        Text(box, 21, "message", "the box %s is full now"),
        Text(add, 1, "comment", "Adds numbers, one lane\nat a time."),
        Text(add, 3, "comment", "the sum of all lanes", "float add(float x);"),
    ]


def test_the_same_seed_draws_the_same_texts(capsys: pytest.CaptureFixture[str]) -> None:
    texts = collect(ROOT, PRODUCT)
    assert draw(texts, 27, 30) == draw(texts, 27, 30) != draw(texts, 28, 30)
    main(["--json", "--seed", "5", "--count", "3"])
    assert [Text(**item) for item in json.loads(capsys.readouterr().out)] == draw(texts, 5, 3)


def test_the_product_has_every_kind_and_nothing_else_is_drawn() -> None:
    texts = collect(ROOT, PRODUCT)
    assert {text.kind for text in draw(texts, 1, 400)} == {"docstring", "comment", "message"}
    assert {text.file.partition("/")[0] for text in texts} == set(PRODUCT)
    assert {Path(text.file).suffix for text in texts} == {".py", ".cpp", ".h", ".metal"}


def test_a_folder_can_be_chosen(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--root", str(root), "--under", "kernels/cpu", "--count", "9"])
    printed = capsys.readouterr().out
    assert printed.startswith("1. kernels/cpu/add.metal:")
    assert "2. " in printed
    assert "3. " not in printed
