"""Says what follows from a board: verdicts, the strategy to choose at a length, a sentence on it, and the Pareto line.

Plain computation on the figures: knows neither the engine nor how pages look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from server.evaluation.board.data import Board, BoardCell, QualityFigures
from server.evaluation.suites.paired import PairedComparison, SuiteVerdict, compare_pairs

MAX_KL = 0.01  # nats a token, within which a strategy is named if the model can do fewer than MIN_TASKS tasks
MIN_TASKS = 2


class CellVerdict(NamedTuple):
    """What the tasks say about a strategy beside exact caching, all together and each for itself."""

    verdict: SuiteVerdict
    tasks: Mapping[str, PairedComparison]

    @property
    def decided_tasks(self) -> int:
        """The number of tasks that are not too hard for the model."""
        return sum(each.verdict is not SuiteVerdict.TOO_HARD for each in self.tasks.values())

    @property
    def samples_needed(self) -> int | None:
        """About how many samples decide all tasks; None if some need more than any number."""
        open_tasks = [each for each in self.tasks.values() if each.verdict is SuiteVerdict.NOT_DECIDED]
        needed = [each.samples_needed for each in open_tasks if each.samples_needed is not None]
        return max(needed) if needed and len(needed) == len(open_tasks) else None


def judge(exact: QualityFigures, other: QualityFigures, margin: float) -> CellVerdict:
    """Return "same" if each task that is not too hard says so, and "worse" if one of them does."""
    tasks = {name: compare_pairs(exact.tasks[name].scores, each.scores, margin) for name, each in other.tasks.items()}
    found = {each.verdict for each in tasks.values()} - {SuiteVerdict.TOO_HARD}
    for verdict in (SuiteVerdict.WORSE, SuiteVerdict.NOT_DECIDED, SuiteVerdict.SAME):
        if verdict in found:
            return CellVerdict(verdict, tasks)
    return CellVerdict(SuiteVerdict.TOO_HARD, tasks)


def recommend(board: Board, length: int) -> BoardCell | None:
    """Return the cell of the strategy to choose for texts of a length, or None.

    It has the least memory of those that answer as exact caching does, and that are within MAX_KL if the model can do
    fewer than MIN_TASKS tasks. It is None unless that is less than exact caching has.
    """
    exact = board.find_cell(length, board.exact)
    if exact is None:
        return None
    near = [
        cell
        for cell in board.list_cells(length)
        if cell.quality.kv_bytes < exact.quality.kv_bytes and _is_near(exact, cell, board.margin)
    ]
    return min(near, key=lambda cell: (cell.quality.kv_bytes, cell.quality.kl_mean), default=None)


def _is_near(exact: BoardCell, other: BoardCell, margin: float) -> bool:
    judged = judge(exact.quality, other.quality, margin)
    if judged.verdict not in (SuiteVerdict.SAME, SuiteVerdict.TOO_HARD):
        return False
    return judged.decided_tasks >= MIN_TASKS or other.quality.kl_mean <= MAX_KL


def find_pareto_line(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the names of the points for which no other is lower in one coordinate and not higher in the other.

    They are ordered by the first coordinate.
    """
    line: list[str] = []
    for name in sorted(points, key=lambda each: points[each]):
        if not line or points[name][1] < points[line[-1]][1] or points[name] == points[line[-1]]:
            line.append(name)
    return line


# ---------------------------------------------------------------- sentences
def describe_length(board: Board, length: int) -> str:
    """Return what to choose for texts of a length, and why, as a sentence or a few."""
    cells = board.list_cells(length)
    exact = next((cell for cell in cells if cell.strategy == board.exact), None)
    others = [cell for cell in cells if cell is not exact]
    begin = f"For texts up to {length:,} tokens"
    if exact is None or not others:
        return f"{begin} nothing is compared yet."
    best = recommend(board, length)
    verdicts = {cell.strategy: judge(exact.quality, cell.quality, board.margin) for cell in others}
    by_verdict = {
        verdict: [cell for cell in others if verdicts[cell.strategy].verdict is verdict] for verdict in SuiteVerdict
    }
    if by_verdict[SuiteVerdict.TOO_HARD]:
        return f"{begin} {_describe_by_kl(exact, best)}."
    decided = next(iter(verdicts.values())).decided_tasks
    parts = [
        _describe_same(exact, best, board.margin),
        _describe_worse(exact, by_verdict[SuiteVerdict.WORSE]),
        _describe_open(by_verdict[SuiteVerdict.NOT_DECIDED], verdicts),
    ]
    return f"{begin} {'; '.join(filter(None, parts))}.{_describe_tasks(decided, len(board.setup.tasks))}"


def _describe_tasks(decided: int, num_tasks: int) -> str:
    """Return how many tasks a verdict is by, unless they are several and the model can do all of them."""
    hard = "" if decided == num_tasks else ", the others being too hard for this model"
    by = f" This is by {decided} of {num_tasks} tasks{hard}"
    if decided < MIN_TASKS:
        return f"{by}; so what is named has to be within {MAX_KL:g} nats a token of exact caching, too."
    return f"{by}." if hard else ""


def _describe_same(exact: BoardCell, best: BoardCell | None, margin: float) -> str:
    """Return which strategy the tasks recommend."""
    if best is None:
        return "no strategy in less memory is known to answer as exact caching does"
    return (
        f"`{best.strategy}` answers as exact caching does, within {100 * margin:g} points, in "
        f"{_compare_memory(exact, best)}{_compare_speed(exact, best)}"
    )


def _describe_worse(exact: BoardCell, worse: Sequence[BoardCell]) -> str:
    if not worse:
        return ""
    listed = ", ".join(f"`{cell.strategy}` ({cell.quality.score:.0%})" for cell in worse)
    return f"{listed} {'answers' if len(worse) == 1 else 'answer'} worse than exact caching ({exact.quality.score:.0%})"


def _describe_open(undecided: Sequence[BoardCell], verdicts: Mapping[str, CellVerdict]) -> str:
    if not undecided:
        return ""
    needed = [verdicts[cell.strategy].samples_needed for cell in undecided]
    known = [number for number in needed if number is not None]
    until = f" before about {max(known):,} samples" if len(known) == len(needed) else ""
    listed = ", ".join(f"`{cell.strategy}`" for cell in undecided)
    return f"{listed} {'is' if len(undecided) == 1 else 'are'} not decided{until}"


def _describe_by_kl(exact: BoardCell, best: BoardCell | None) -> str:
    """Return which strategy running text recommends if the tasks say nothing."""
    begin = "all tasks are too hard for this model, which leaves running text: "
    if best is None:
        return f"{begin}no strategy in less memory is within {MAX_KL:g} nats a token of exact caching"
    return (
        f"{begin}`{best.strategy}` is the smallest within {MAX_KL:g} nats a token of exact caching "
        f"({best.quality.kl_mean:.2g}), in {_compare_memory(exact, best)}{_compare_speed(exact, best)}"
    )


def _compare_memory(exact: BoardCell, other: BoardCell) -> str:
    return f"{other.quality.kv_bytes / exact.quality.kv_bytes:.2f} of the memory"


def _compare_speed(exact: BoardCell, other: BoardCell) -> str:
    if exact.speed is None or other.speed is None:
        return ""
    return f" at {other.speed.rate_8 / exact.speed.rate_8:.2f} of the speed with 8 streams"
