"""The picture of the README's example shows what was printed, and loads nothing from the network."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from tools.readme_picture import PICTURE, draw_terminal, read_example, select_lines

SERVED = """kvmux 1.0.0 loads tiny ...
2026-01-01 INFO worker-0: Started server process [1]

kvmux 1.0.0 serves tiny on http://127.0.0.1:8000

  kernels     cpu-avx512

Try it:

  curl http://127.0.0.1:8000/v1/completions
2026-01-01 INFO worker-0: POST /v1/completions 200, length, paged, 5 + 4 tokens
"""


def text_of(svg: str) -> str:
    return "".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ")


def test_the_banner_and_the_lines_of_completions_are_selected() -> None:
    selected = select_lines(SERVED)
    assert selected.startswith("kvmux 1.0.0 serves tiny")
    assert "Try it" not in selected
    assert selected.endswith("POST /v1/completions 200, length, paged, 5 + 4 tokens\n")


def test_a_terminal_is_drawn_with_its_commands_and_their_output() -> None:
    svg = draw_terminal([("echo hello", "hello\n"), ("echo bold", "\x1b[1mbold\x1b[0m\n")])
    assert "$ echo hello" in text_of(svg)
    assert "url(http" not in svg
    assert "@font-face" not in svg


def test_the_committed_picture_is_of_the_readme_s_example() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    _, config = read_example(readme)
    shown = text_of(PICTURE.read_text())
    assert f"$ kvmux serve --config {config}" in shown
    assert "prompt tokens cached" in shown
