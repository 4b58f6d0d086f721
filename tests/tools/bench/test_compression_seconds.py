"""tools.bench.compression.seconds measures every scorer, and `streaming`, on a shape that is small enough for tests."""

from __future__ import annotations

import re

import pytest

from cache_strategies.scorers import BUILTIN
from tools.bench.compression.seconds import main

SMALL = "--layers 2 --kv-heads 2 --q-heads 4 --head-dim 16 --budget 160 --every 64 --rounds 2 --threads 1"


def run(capsys: pytest.CaptureFixture[str], arguments: str) -> dict[str, list[float]]:
    """Return the figures of each row that is printed."""
    assert main(f"{SMALL} {arguments}".split()) == 0
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", capsys.readouterr().out, re.MULTILINE)
    return {name: [float(each) for each in re.findall(r"[\d.]+", cells)] for name, cells in rows}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_scorer_has_a_row(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run(capsys, f"--dtype {dtype} --cpu-time")
    assert set(figures) >= {*BUILTIN, "streaming"}
    for name, (score, least_score, rest, least_rest) in figures.items():
        assert score >= least_score >= 0, name
        assert rest >= least_rest > 0, name
    assert figures["streaming"][:2] == [0, 0], "no scorer is asked"
    assert figures["h2o"][0] > figures["streaming_llm"][0]
