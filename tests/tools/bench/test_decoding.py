"""tools.bench.decoding lets strategies take turns on the same sequences, and pairs their times by round."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from cache_strategies.base import KVCache
from server.models.base import Model
from tools.bench.decoding import __main__ as decoding
from tools.bench.decoding.steps import WARMUP_STEPS, Turn

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


def test_strategies_hold_the_same_sequences_and_are_compacted(capsys: pytest.CaptureFixture[str]) -> None:
    strategies = ["--strategy", "contiguous", "--strategy", "paged:block_size=1", "--strategy", COMPRESSED]
    decoding.main([*SMALL, *strategies, "--sequences", "1", "3", "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    contiguous, paged, compressed = ([each["kv_bytes"] for each in found[i::3]] for i in range(3))
    assert contiguous == paged
    tokens = 100 + WARMUP_STEPS + 40
    assert paged[1] == 3 * paged[0]
    assert paged[0] % tokens == 0
    # 145 tokens: compacted to 48 at 128, and 17 more.
    assert compressed == [paged[i] // tokens * (48 + 17) for i in range(2)]
    assert all(0 < each["compaction_ms"] < 40 * each["step_ms"] for each in found)


def test_turns_alternate_and_are_paired_by_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = {"paged": iter([9.0, 3.0, 4.0, 1.0]), "contiguous": iter([1.0, 2.0, 8.0, 1.0])}
    order = []

    def take_turn(model: Model, cache: KVCache, prompts: Sequence[Sequence[int]], steps: int) -> Turn:
        order.append(cache.name)
        return Turn(next(seconds[cache.name]), 0.5, 1000)

    monkeypatch.setattr(decoding, "take_turn", take_turn)
    strategies = ["--strategy", "paged", "--strategy", "contiguous"]
    decoding.main([*SMALL, *strategies, "--rounds", "3", "--sequences", "2", "--json"])
    assert order == [*["contiguous", "paged", "paged", "contiguous"] * 2]
    out, progress = capsys.readouterr()
    paged, contiguous = map(json.loads, out.splitlines())
    assert (paged["speedup"], paged["speedup_interval"]) == (1, [1, 1])
    assert (contiguous["speedup"], contiguous["speedup_interval"]) == (1, [0.5, 1.5])  # of 1.5, 0.5 and 1
    assert contiguous["step_ms"] == 1e3 * 2 / 40
    assert [line for line in progress.splitlines() if line.startswith("sequences:")] == [
        "sequences: 2, warm-up: paged 225.00 ms, contiguous 25.00 ms",
        "sequences: 2, round 1 of 3: paged 75.00 ms, contiguous 50.00 ms",
        "sequences: 2, round 2 of 3: paged 100.00 ms, contiguous 200.00 ms",
        "sequences: 2, round 3 of 3: paged 25.00 ms, contiguous 25.00 ms",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "quest:budget=1.5"], "strategies.quest-budget1-5.budget"),
        (["--kv-memory", "1MiB", "--sequences", "16", "--strategy", "paged"], "--kv-memory"),
    ],
)
def test_a_wrong_option_is_an_error_of_the_command(
    arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        decoding.main([*SMALL, *arguments])
    assert message in capsys.readouterr().err
