"""kvmux is compared with a peer by the pairs of each turn, and an interval says how far the median can be trusted."""

from __future__ import annotations

import json
import random
from datetime import datetime
from statistics import median

import pytest

from tools.bench.peers.measure import PeerMeasurement
from tools.bench.peers.ratios import PairedRatio, format_ratio, pair_turns
from tools.bench.peers.report import PeerReport, as_json, as_text
from tools.bench.peers.workloads import list_rows
from tools.bench.table.goals import BenchmarkRow

STEP, SPEED = (next(row for row in list_rows(["e8"]) if row.measure == measure) for measure in ("step", "output"))


def measure(server: str, row: BenchmarkRow, *values: float | None) -> list[PeerMeasurement]:
    """Return a measurement for each turn."""
    return [PeerMeasurement(server, row, value, turn=turn) for turn, value in enumerate(values, 1)]


def make_report(turns: int, found: list[PeerMeasurement]) -> PeerReport:
    names = dict.fromkeys(each.server for each in found if each.server != "kvmux")
    return PeerReport(datetime(2026, 1, 2).astimezone(), turns, ["e8"], [], dict.fromkeys(["kvmux", *names], ""), found)


def test_a_ratio_says_how_many_times_as_fast_kvmux_is() -> None:
    found = [*measure("kvmux", STEP, 50, 100, 40), *measure("other", STEP, 100, 100, 120)]
    ratio = pair_turns("other", STEP, found)
    assert ratio is not None
    assert ratio.ratios == [2, 1, 3], "half the time is twice as fast"
    assert (ratio.median, ratio.interval, ratio.coverage) == (2, (1, 3), 0.75)
    found = [*measure("kvmux", SPEED, 50, 100), *measure("other", SPEED, 100, 100)]
    ratio = pair_turns("other", SPEED, found)
    assert ratio is not None
    assert ratio.ratios == [0.5, 1], "half the tokens are half as fast"


def test_turns_without_both_values_are_left_out() -> None:
    found = [*measure("kvmux", STEP, None, 100, 40), *measure("other", STEP, 100, None, 120)]
    ratio = pair_turns("other", STEP, found)
    assert ratio is not None
    assert ratio.ratios == [3]
    assert pair_turns("other", SPEED, found) is None
    assert pair_turns("third", STEP, found) is None


def test_drift_between_turns_does_not_matter() -> None:
    """The ratio of both medians would say something else where the machine is slower in some turns."""
    drift = [random.uniform(0.3, 3) for _ in range(9)]
    found = [*measure("kvmux", STEP, *drift), *measure("other", STEP, *(1.25 * each for each in drift))]
    ratio = pair_turns("other", STEP, found)
    assert ratio is not None
    assert ratio.interval == pytest.approx((1.25, 1.25))
    assert ratio.coverage >= 0.95


def test_few_turns_say_with_which_probability() -> None:
    assert format_ratio(None) == "-"
    assert format_ratio(PairedRatio("x", STEP, [1.5])) == "1.50"
    assert format_ratio(PairedRatio("x", STEP, [2.0, 1.0])) == "1.50 (1.00 to 2.00; 50%)"
    assert format_ratio(PairedRatio("x", STEP, [2.0, 1.0, 3.0, 4.0, 5.0])) == "3.00 (1.00 to 5.00; 94%)"
    assert format_ratio(PairedRatio("x", STEP, [2.0, 1.0, 3.0, 4.0, 5.0, 6.0])) == "3.50 (1.00 to 6.00)"


def test_a_report_has_the_ratios_beside_the_medians_and_json_all_turns() -> None:
    ours, theirs, broken = (50.0, 40.0), (100.0, 120.0), (None, None)
    found = [*measure("kvmux", STEP, *ours), *measure("other", STEP, *theirs), *measure("broken", STEP, *broken)]
    text = as_text(make_report(2, found))
    assert f"| times as fast as | other |\n|---|---:|\n| {STEP.what} | 2.50 (2.00 to 3.00; 50%) |" in text
    assert "of fewer than 6 turns it is the whole range" in text
    told = json.loads(json.dumps(as_json(make_report(2, found))))
    values = {(each["server"], each["turn"]): each["value"] for each in told["measurements"]}
    assert len(values) == len(found)
    (ratio,) = told["ratios"]
    again = [values["other", turn] / values["kvmux", turn] for turn in (1, 2)]
    assert (ratio["peer"], ratio["turns"], ratio["times_as_fast"]) == ("other", again, median(again))
    assert (ratio["interval"], ratio["coverage"]) == ([2, 3], 0.5)


def test_without_a_peer_there_is_no_table_of_ratios() -> None:
    assert "times as fast" not in as_text(make_report(1, measure("kvmux", STEP, 50.0)))
