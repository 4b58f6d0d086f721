"""Fills a board cell by cell, and writes its files after each, so that an interrupted run can go on.

Quality comes first, a cell for each strategy; then the speed of all strategies at that length, by turns. How an engine
is built and running text is read, `BoardSource` says.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.progress import Progress

from config.errors import SettingsError
from server.engine.build import Engine
from server.engine.info import compute_digest, get_effective_settings, get_versions
from server.evaluation.board.data import (
    FORMAT,
    Board,
    BoardCell,
    BoardSetup,
    QualityFigures,
    TaskFigures,
    check_same_setup,
    describe_strategy,
    load_board,
    write_files,
)
from server.evaluation.board.page import make_files
from server.evaluation.board.speed import TURNS, SpeedMeter
from server.evaluation.flags import EvaluateOptions
from server.evaluation.report import StrategyResult
from server.evaluation.suites.command import make_runner
from server.evaluation.suites.runner import SuiteRunner
from server.profiling.machine import read_processor_name

# Settings that change answers or speed, and are the same for all cells
ENGINE_SETTINGS = ("model_impl", "device", "dtype", "weights", "kernels", "threads", "max_num_batched_tokens")


class BoardSource(NamedTuple):
    """Where a board's engines and figures of running text come from."""

    # Of a length: (an engine, the strategies' names, exact caching first)
    start: Callable[[int], tuple[Engine, list[str]]]
    # Of (an engine, exact caching and perhaps another strategy): a result for each
    read_text: Callable[[Engine, Sequence[str], Progress], Sequence[StrategyResult]]
    command: str  # that was given


class BoardRunner:
    """Runs what is missing of a board in a folder."""

    def __init__(self, folder: Path, options: EvaluateOptions, source: BoardSource, bars: Progress) -> None:
        self._folder, self._options, self._source, self._bars = folder, options, source, bars
        self._board: Board | None = None
        self._bar = bars.add_task("loading", total=None)

    def run(self, lengths: Sequence[int]) -> bool:
        """Measure the missing cells; return whether all are there, which Ctrl-C prevents.

        Raises SettingsError if the folder has a board of another setup, if a length has no room, or on failure.
        """
        try:
            for length in lengths:
                gc.collect()  # an engine may have cycles, and the next one needs its memory
                if not self._run_length(length, len(lengths)):
                    return False
        except KeyboardInterrupt:
            return False
        return True

    def _run_length(self, length: int, num_lengths: int) -> bool:
        self._show(f"loading for {length:,} tokens")
        engine, names = self._source.start(length)
        runner = make_runner(engine, names, self._options)
        setup = make_setup(engine, names, runner, self._options)
        board = self._board = self._board or self._open_board(setup, list_non_defaults(engine, names))
        check_same_setup(board.setup, setup, self._folder)
        meter = SpeedMeter(engine, length, setup.seed)
        meter.check_room(names)
        self._bars.update(self._bar, total=num_lengths * len(names) * 2)
        for name in names:
            if board.find_cell(length, name) is None:
                self._show(f"{length:,} tokens: {name}")
                quality = self._measure_quality(engine, runner, name)
                if quality is None:
                    return False
                self._save(board, BoardCell(length, name, quality))
        if any(cell.speed is None for cell in board.list_cells(length)):
            self._measure_speed(board, meter, length, names)
        return True

    def _open_board(self, setup: BoardSetup, non_defaults: dict[str, dict[str, Any]]) -> Board:
        """Return the board of the folder, or a new one. A margin changes no cell, only what follows from them."""
        margin = self._options.margin / 100
        board = load_board(self._folder)
        if board is None:
            return Board(FORMAT, "", margin, setup, [], non_defaults)
        check_same_setup(board.setup, setup, self._folder)
        board.margin, board.non_defaults = margin, non_defaults
        write_files(self._folder, make_files(board, self._folder))  # also because a newer version may say more
        return board

    # ---------------------------------------------------------------- cells
    def _measure_quality(self, engine: Engine, runner: SuiteRunner, name: str) -> QualityFigures | None:
        """Return what a strategy answers and how far it is from exact caching; None after Ctrl-C."""
        *_, result = self._source.read_text(engine, list(dict.fromkeys([runner.names[0], name])), self._bars)
        bar = self._bars.add_task("samples", total=len(runner.tasks) * runner.samples)
        scores = runner.run(
            lambda task: self._bars.update(bar, advance=1, description=f"samples of {task}"), names=[name]
        )
        if any(each.count < runner.samples for each in scores):
            return None
        text = result.text
        return QualityFigures(
            exact=result.exact,
            kv_bytes=result.kv_bytes,
            tokens=text.num_tokens,
            top1_agreement=text.agreement,
            kl_mean=text.kl,
            kl_median=text.kl_quantile(0.5),
            kl_p99=text.kl_quantile(0.99),
            tasks={each.task.name: TaskFigures(each.by_strategy[name], each.tokens) for each in scores},
        )

    def _measure_speed(self, board: Board, meter: SpeedMeter, length: int, names: Sequence[str]) -> None:
        """Measure the speed of all strategies anew, as turns of different runs cannot be compared."""
        self._show(f"{length:,} tokens: speed")
        bar = self._bars.add_task("turns", total=TURNS * len(names))
        found = meter.measure(names, lambda name: self._bars.update(bar, advance=1, description=f"speed of {name}"))
        for cell in board.list_cells(length):
            cell.speed = found[cell.strategy]
        self._save(board)

    def _save(self, board: Board, *cells: BoardCell) -> None:
        board.cells = sorted([*board.cells, *cells], key=lambda cell: cell.length)
        board.commands = list(dict.fromkeys([*board.commands, self._source.command]))
        board.date = datetime.now().astimezone().isoformat(timespec="seconds")
        write_files(self._folder, make_files(board, self._folder))

    def _show(self, text: str) -> None:
        """Show what is measured next, in place of the bars of what is done."""
        done = 0 if self._board is None else sum(1 + (cell.speed is not None) for cell in self._board.cells)
        for bar in self._bars.task_ids:
            if bar != self._bar:
                self._bars.remove_task(bar)
        self._bars.update(self._bar, description=text, completed=done)


def make_setup(engine: Engine, names: Sequence[str], runner: SuiteRunner, options: EvaluateOptions) -> BoardSetup:
    """Return how the cells of an engine are measured."""
    settings, declared = get_effective_settings(engine), {each.name: each for each in engine.instances}
    return BoardSetup(
        model=engine.model_name,
        digest=compute_digest([], engine.model_dir),
        version=get_versions(),
        machine={"processor": read_processor_name(), "processors": psutil.cpu_count()},
        engine={name: settings[name] for name in ENGINE_SETTINGS},
        strategies={name: describe_strategy(declared[name].kind, declared[name].options) for name in names},
        tasks=[task.name for task in runner.tasks],
        samples=runner.samples,
        text={
            "source": str(options.text or "stories"),
            **{name: getattr(options, name) for name in ("texts", "seed", "last", "row_tokens")},
        },
        seed=runner.seed,
        query_aware=options.query_aware,
    )


def list_non_defaults(engine: Engine, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the options of each strategy that are not the defaults of its kind."""
    options = {each.name: each.options for each in engine.instances}
    return {name: options[name].model_dump(mode="json", exclude_defaults=True) for name in names}


def choose_lengths(given: Sequence[int], positions: int, defaults: Sequence[int] = (1024, 4096)) -> list[int]:
    """Return the lengths of a board, shortest first. Raises SettingsError if one is longer than the model's context."""
    if given and max(given) > positions:
        raise SettingsError(f"--lengths: should be at most {positions:,}, the context of the model")
    return sorted({*given}) or [each for each in defaults if each <= positions] or [positions]
