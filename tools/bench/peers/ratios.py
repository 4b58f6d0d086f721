"""Compares kvmux with each peer by pairs: a ratio for each turn in which both were measured, and their median.

Both of a pair are measured within the same turn, so a machine whose speed drifts from turn to turn affects both. The
interval is of order statistics (a sign test): it holds for any distribution, but needs six turns for 95 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tools.bench.peers.measure import PeerMeasurement
from tools.bench.table.goals import LOWER_IS_BETTER, BenchmarkRow
from tools.compare_checkouts import compute_coverage, compute_interval

OURS = "kvmux"
ENOUGH_TURNS = 6  # for an interval of 95 %


@dataclass(frozen=True)
class PairedRatio:
    """How many times as fast as a peer kvmux is in a row."""

    peer: str
    row: BenchmarkRow
    ratios: Sequence[float]  # by turn, in order; more than 1: kvmux is faster

    @property
    def median(self) -> float:
        return median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """The bounds between which the median lies with the probability `coverage`."""
        return compute_interval(self.ratios)

    @property
    def coverage(self) -> float:
        return compute_coverage(len(self.ratios))


def pair_turns(peer: str, row: BenchmarkRow, measurements: Iterable[PeerMeasurement]) -> PairedRatio | None:
    """Return the ratios of the turns in which both servers have a value in this row; None if there are none."""
    of_row = [each for each in measurements if each.row == row]
    ours, theirs = _by_turn(of_row, OURS), _by_turn(of_row, peer)
    ratios = [_divide(row, ours[turn], theirs[turn]) for turn in sorted(ours.keys() & theirs.keys())]
    return PairedRatio(peer, row, ratios) if ratios else None


def list_ratios(
    peers: Sequence[str], rows: Sequence[BenchmarkRow], measurements: Sequence[PeerMeasurement]
) -> Iterator[PairedRatio]:
    """Yield the ratios of all rows and peers that have any."""
    found = (pair_turns(peer, row, measurements) for row in rows for peer in peers)
    yield from (each for each in found if each is not None)


def _by_turn(measurements: Iterable[PeerMeasurement], server: str) -> dict[int, float]:
    return {each.turn: each.value for each in measurements if each.server == server and each.value}


def _divide(row: BenchmarkRow, ours: float, theirs: float) -> float:
    """Return how many times as fast ours is: a ratio of speeds, or the reciprocal of a ratio of times."""
    return theirs / ours if row.measure in LOWER_IS_BETTER else ours / theirs


def format_ratio(ratio: PairedRatio | None) -> str:
    """Return the median and the interval, with the probability of one that has less than 95 %."""
    if ratio is None:
        return "-"
    if len(ratio.ratios) == 1:
        return f"{ratio.median:.2f}"
    (low, high), turns = ratio.interval, len(ratio.ratios)
    probability = f"; {ratio.coverage:.0%}" if turns < ENOUGH_TURNS else ""
    return f"{ratio.median:.2f} ({low:.2f} to {high:.2f}{probability})"


def ratio_as_json(ratio: PairedRatio) -> Mapping[str, Any]:
    return {
        "peer": ratio.peer,
        "workload": ratio.row.workload,
        "what": ratio.row.what,
        "times_as_fast": ratio.median,
        "interval": ratio.interval,
        "coverage": ratio.coverage,
        "turns": list(ratio.ratios),
    }
