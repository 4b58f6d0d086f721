"""The price of the process that tokenizes is measured, here only that it is."""

from __future__ import annotations

import json

import pytest

from tools.bench.tokenizing import TokenizingCost, compute_interval, main


def test_it_prints_what_both_took(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rounds", "2", "--calls", "2", "--messages", "3", "--json"])
    chat, prompt = [TokenizingCost(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    assert (chat.what, prompt.what) == ("a chat of 3 messages", "a prompt of one sentence")
    for cost in (chat, prompt):
        assert min(cost.in_process, cost.sandboxed) > 0
        assert cost.low <= cost.difference <= cost.high


def test_the_interval_is_that_of_a_median() -> None:
    assert compute_interval([3.0] * 9) == (3.0, 3.0)
    low, high = compute_interval([*range(101)])
    assert 25 < low < 50 < high < 75
