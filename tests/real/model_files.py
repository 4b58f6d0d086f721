"""Finds the files of real models, which `make models` fetches.

Where REQUIRE_SMOLLM2 is set the absence of SmolLM2 is a failure, not a skip. Tests of the other models have the mark
`real`, and `make test` does not select them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tools.real_models import REAL_MODELS

ROOT = Path(__file__).parents[2]
REQUIRED = {"smollm2"} if os.environ.get("REQUIRE_SMOLLM2") else set[str]()


def find_model(name: str) -> Path:
    """Return the path of a model's file; without it the test is skipped, or fails if the model is required."""
    path = REAL_MODELS[name].path
    if not path.exists():
        (pytest.fail if name in REQUIRED else pytest.skip)(f"no {path.name}: `make models MODELS={name}` fetches it")
    return path


def model_params(names: Sequence[str] = tuple(REAL_MODELS)) -> Iterator[ParameterSet]:
    """Yield parameters for tests of several models, with the mark `real` for all but SmolLM2."""
    for name in names:
        yield pytest.param(name, marks=[] if name == "smollm2" else [pytest.mark.real])


def read_texts() -> dict[str, str]:
    """Return real texts of three kinds: a licence, documentation and a program."""
    files = {"licence": "LICENSE", "documentation": "docs/guide/writing_a_strategy.md", "program": "server/llm.py"}
    return {kind: (ROOT / file).read_text() for kind, file in files.items()}


def read_long_text() -> str:
    """Return a real text of some 100,000 tokens: all pages of the documentation."""
    return "\n".join(file.read_text() for file in sorted((ROOT / "docs").rglob("*.md")))
