"""tools.bench.hooks times the hook's own calls, and compares the rest of the step."""

from __future__ import annotations

import json

import pytest

from tools.bench.hooks import __main__ as hooks


def test_the_hook_is_timed_and_the_verdict_follows_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    hooks.main(["--sequences", "2", "--tokens", "20", "--rounds", "2", "--steps", "4", "--json"])
    cost = hooks.HookCost(**json.loads(capsys.readouterr().out))
    assert 0 < cost.hook < cost.step_with_hook
    assert cost.step > 0
    low, high = cost.ratio_interval
    assert low <= cost.ratio <= high
    for ratio, verdict in ((1.04, "within"), (1.06, "ABOVE")):
        assert verdict in hooks.format_cost(cost._replace(ratio=ratio, ratio_interval=(1.0, 1.1)))
