"""tools.bench.mirrored lets both strategies take turns, and says what a token of each takes."""

from __future__ import annotations

import re

import pytest

from tools.bench.mirrored import __main__ as compare_mirrored


def test_both_strategies_have_a_line_for_each_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_mirrored, "SEQUENCES", (1, 2))
    monkeypatch.setattr(compare_mirrored, "CONTEXTS", (16, 40))
    monkeypatch.setattr(compare_mirrored, "KV_MEMORY", "16MiB")
    compare_mirrored.main(["--model", "tiny", "--rounds", "2", "--steps", "5", "--dtype", "float32"])
    memory, _, _, *lines = capsys.readouterr().out.splitlines()
    sizes = re.fullmatch(r"bytes per token, float32: contiguous ([\d,]+), mirrored ([\d,]+)", memory)
    assert sizes
    plain, doubled = (int(size.replace(",", "")) for size in sizes.groups())
    assert doubled % plain == 0
    assert doubled >= 2 * plain
    loads = [tuple(cell.strip() for cell in line.split("|")[1:4]) for line in lines]
    assert loads == [(n, c, f"`{kind}`") for n in "12" for c in ("16", "40") for kind in compare_mirrored.KINDS]
    for line in lines:
        low, high = line.split("|")[5].replace(",", "").split(" to ")
        assert 0 < float(low) <= float(high)
