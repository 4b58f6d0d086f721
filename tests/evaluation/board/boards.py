"""Boards with made-up figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from server.evaluation.board import data

RIGHT, WRONG = [1.0] * 40, [0.0] * 40
KIND = {"kind": "paged", "block_size": 32}  # of every strategy


def make_quality(
    tasks: Mapping[str, Sequence[float]], *, kv_bytes: int = 1000, kl: float = 0.0, exact: bool = False
) -> data.QualityFigures:
    figures = {name: data.TaskFigures([*scores], [100] * len(scores)) for name, scores in tasks.items()}
    return data.QualityFigures(exact, kv_bytes, 500, 0.987654, kl, kl / 3, 7 * kl, figures)


def make_speed(rate: float = 10.0, others_share: float = 0.0) -> data.SpeedFigures:
    return data.SpeedFigures(
        [0.5, 0.7, 0.6], [rate, rate, rate], [2 * rate, 4 * rate, 3 * rate], 1000, 8000, others_share
    )


def make_setup(strategies: Sequence[str], tasks: Sequence[str]) -> data.BoardSetup:
    version, machine = {"version": "1.0.0", "torch": "2"}, {"processor": "a processor", "processors": 2}
    engine, kinds = {"dtype": "bfloat16", "weights": "gguf", "threads": 2}, dict.fromkeys(strategies, KIND)
    text = {"source": "stories", "texts": 2}
    return data.BoardSetup("model <1>", "0123ef", version, machine, engine, kinds, [*tasks], 40, text, "0", False)


def make_board(cells: Mapping[str, data.QualityFigures], *, length: int = 4096, speed: bool = True) -> data.Board:
    """Return a board of one length whose first cell is the exact one; each further strategy is faster by a tenth."""
    tasks = list(next(iter(cells.values())).tasks)
    made = [
        data.BoardCell(length, name, quality, make_speed(10.0 + i) if speed else None)
        for i, (name, quality) in enumerate(cells.items())
    ]
    setup, non_defaults = make_setup(list(cells), tasks), {name: dict[str, object]() for name in cells}
    return data.Board(data.FORMAT, "2026-11-30T21:00:00+00:00", 0.1, setup, made, non_defaults)
