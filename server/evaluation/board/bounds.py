"""Takes the bounds of roll-outs from a board, so that what was measured offline is what is watched live.

The setting `board` names its folder. Each engine reads it at its start, and tells the controller of roll-outs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from config.errors import SettingsError
from config.rollouts import GuardSettings
from server.engine.build import Engine
from server.engine.info import compute_digest, get_effective_settings
from server.engine.ipc.messages import BoardBounds
from server.evaluation.board.data import Board, BoardCell, check_board_file, describe_strategy, load_board
from server.evaluation.board.verdicts import judge
from server.evaluation.suites.paired import SuiteVerdict

log = logging.getLogger(__name__)

# Times the measured divergence: that of a format differs by a factor of two between kinds of text
# (docs/laboratory/kv_formats.md), and a live one is estimated from few requests
MARGIN = 3.0
# What counts as measured at least: with weights in few bits activations are rounded, and the order of additions alone
# moves predictions by up to 0.008 nats a token on average (the same page)
LEAST_KL_MEAN, LEAST_KL_P99, LEAST_DISAGREEMENT = 0.005, 0.05, 0.01
FORMATS = ("dtype", "weights")  # settings of the engine without which the figures are those of another model


def read_board_bounds(engine: Engine, *, is_restart: bool = False) -> BoardBounds | None:
    """Return what the board of an engine's settings allows each of its instances; None if they name no board.

    Raises SettingsError if there is no board, or one of another model or number format, or if it has no bounds for a
    roll-out of the settings that takes them from it. On a restart that is logged, and None is returned: the server
    goes on with the bounds that it has.
    """
    if engine.settings.board is None:
        return None
    try:
        return _read(engine, Path(engine.settings.board))
    except SettingsError as error:
        if not is_restart:
            raise
        log.error("%s; roll-outs keep the bounds that they have", error)
        return None


def _read(engine: Engine, folder: Path) -> BoardBounds:
    check_board_file(folder)
    board = load_board(folder)
    assert board is not None
    _check_model(engine, board, folder)
    found = _list_bounds(engine, board, folder)
    for name, rollout in engine.settings.rollouts.items():
        if rollout.guard.board:
            try:
                found.find(rollout.from_, rollout.to)
            except ValueError as error:
                raise SettingsError(f"rollouts.{name}.guard: {error}") from None
    longest = max(board.lengths, default=0)
    if engine.max_seq_len > longest:
        log.info("board %s: measured with texts up to %d tokens; longer ones may diverge further", folder, longest)
    if board.setup.query_aware:
        log.warning("board %s: measured with --query-aware, where strategies see questions sooner than here", folder)
    return found


def _check_model(engine: Engine, board: Board, folder: Path) -> None:
    """Raise SettingsError if a board's figures are not those of the engine's model."""
    settings, advice = get_effective_settings(engine), "name the board of this model, or measure it in another folder"
    if board.setup.digest != compute_digest([], engine.model_dir):
        raise SettingsError(
            f"board: {folder} was measured with {board.setup.model}, whose files are not those of {engine.model_name}: "
            f"{advice}"
        )
    for name in FORMATS:
        if board.setup.engine[name] != settings[name]:
            raise SettingsError(
                f"board: {folder} was measured with {name} {board.setup.engine[name]}, not {settings[name]}: {advice}"
            )


def _list_bounds(engine: Engine, board: Board, folder: Path) -> BoardBounds:
    settings = get_effective_settings(engine)
    is_timed = all(board.setup.engine[name] == settings[name] for name in ("device", "kernels"))
    lengths = list_relevant_lengths(board.lengths, engine.max_seq_len)
    found = BoardBounds([], {}, {})
    for instance in engine.instances:
        if engine.core.instances[instance.name].contract.exact:
            found.exact.append(instance.name)
        described = describe_strategy(instance.kind, instance.options)
        name = next((name for name, each in board.setup.strategies.items() if each == described), None)
        cells = [cell for cell in board.cells if cell.strategy == name and cell.length in lengths]
        if name is None:
            found.refusals[instance.name] = (
                f"the board in {folder} has no strategy with the options of {instance.name!r}; it has "
                f"{', '.join(board.setup.strategies)}"
            )
        elif not lengths or len(cells) < len(lengths):
            found.refusals[instance.name] = (
                f"the board in {folder} is not measured to its end for {name}: the same `kvmux evaluate` goes on"
            )
        elif worse := _find_worse(board, cells):
            found.refusals[instance.name] = (
                f"the board in {folder} says that {instance.name!r} answers worse than exact caching ({worse}): "
                "choose another strategy, or write bounds"
            )
        else:
            found.bounds[instance.name] = compute_bounds(board, cells, is_timed=is_timed)
    return found


def list_relevant_lengths(lengths: Sequence[int], max_seq_len: int) -> list[int]:
    """Return the lengths of a board, shortest first, up to the first that is as long as any text may be."""
    return [length for i, length in enumerate(lengths) if i == 0 or lengths[i - 1] < max_seq_len]


def _find_worse(board: Board, cells: Sequence[BoardCell]) -> str:
    """Return the first task and length at which a strategy answers worse; an empty text if there is none."""
    for cell in cells:
        exact = board.find_cell(cell.length, board.exact)
        if exact is not None and exact is not cell:
            for task, compared in judge(exact.quality, cell.quality, board.margin).tasks.items():
                if compared.verdict is SuiteVerdict.WORSE:
                    scores = (each.quality.tasks[task].score for each in (exact, cell))
                    return "{}: {:.0%} and {:.0%} at {:,} tokens".format(task, *scores, cell.length)
    return ""


def compute_bounds(board: Board, cells: Sequence[BoardCell], *, is_timed: bool) -> dict[str, float]:
    """Return the bounds of a strategy, from its cells: the divergence at the worst length, times MARGIN.

    With `is_timed`, a strategy that was measured to be slower may be slower by so much more than the default.
    """
    disagreement = max(LEAST_DISAGREEMENT, *(1 - cell.quality.top1_agreement for cell in cells))
    bounds = {
        "kl_mean": round(MARGIN * max(LEAST_KL_MEAN, *(cell.quality.kl_mean for cell in cells)), 6),
        "kl_p99": round(MARGIN * max(LEAST_KL_P99, *(cell.quality.kl_p99 for cell in cells)), 6),
        "top1": round(max(0.0, 1 - MARGIN * disagreement), 6),
    }
    return bounds | (_compute_time_ratios(board, cells) if is_timed else {})


def _compute_time_ratios(board: Board, cells: Sequence[BoardCell]) -> dict[str, float]:
    """Return the default bounds of times, multiplied by how much slower than exact caching a strategy is at most."""
    first, later = [1.0], [1.0]
    for cell in cells:
        exact = board.find_cell(cell.length, board.exact)
        if cell.speed is not None and exact is not None and exact.speed is not None:
            first.append(cell.speed.first_token / exact.speed.first_token)
            later.append(exact.speed.rate_8 / cell.speed.rate_8)
    default = GuardSettings()
    assert default.ttft_p95_ratio is not None
    assert default.itl_p95_ratio is not None
    return {
        "ttft_p95_ratio": round(default.ttft_p95_ratio * max(first), 3),
        "itl_p95_ratio": round(default.itl_p95_ratio * max(later), 3),
    }
