"""tools.bench.decoding lets strategies take turns on the same sequences, and pairs their times by round."""

from __future__ import annotations

import pytest

from tools.bench.decoding import __main__ as decoding

SMALL = ["--model", "tiny", "--context", "100", "--rounds", "2", "--steps", "40", "--kv-memory", "64MiB"]
COMPRESSED = "compressed:budget=48,every=32"


def test_each_strategy_has_a_line_for_each_number_of_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    strategies = ["--strategy", "paged", "--strategy", "quest:budget=32,block_size=8", "--strategy", COMPRESSED]
    assert decoding.main([*SMALL, *strategies, "--sequences", "1", "2"]) == 0
    head, rule, *lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()
    ]
    assert len({len(line) for line in (head, rule, *lines)}) == 1
    names = ["`paged`", "`quest-budget32-block_size8`", "`compressed-budget48-every32`"]
    assert [line[:2] for line in lines] == [[count, name] for count in "12" for name in names]
    for _, name, _, step, _, ratio, interval in lines:
        low, high = map(float, interval.split(" to "))
        assert float(step.removesuffix(" ms")) > 0
        assert low <= float(ratio) <= high
        assert name != "`paged`" or low == high == 1
