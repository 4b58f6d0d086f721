"""What a board holds (`Board`), and its file board.json, from which an interrupted run goes on.

Knows neither the engine nor what follows from the figures.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from config.errors import SettingsError, convert_write_errors

FORMAT = 1  # of board.json
FILE = "board.json"


class TaskFigures(msgspec.Struct):
    """The samples of a task under one strategy, in an order that is the same for all strategies."""

    scores: list[float]  # from 0 to 1
    tokens: list[int]  # of the longest prompt of each sample

    @property
    def score(self) -> float:
        return fmean(self.scores)


class QualityFigures(msgspec.Struct):
    """What a strategy answers and keeps, beside exact caching."""

    exact: bool  # whether the strategy promises to drop and round nothing
    kv_bytes: int  # the most bytes of KV memory for one text of the length
    tokens: int  # of running text, for the figures that follow
    top1_agreement: float  # share of tokens with the same likeliest token as exact caching
    kl_mean: float  # KL divergence from exact caching, nats a token
    kl_median: float
    kl_p99: float
    tasks: dict[str, TaskFigures]

    @property
    def score(self) -> float:
        """The mean over the tasks of their mean scores."""
        return fmean(task.score for task in self.tasks.values())


class SpeedFigures(msgspec.Struct):
    """How fast a strategy is at one length: a figure for each turn."""

    first_token_seconds: list[float]  # from a prompt of the length to its first token, one stream
    tokens_per_second_1: list[float]  # of one stream, after its first token
    tokens_per_second_8: list[float]  # of eight streams together, once each has had its first token
    held_bytes_1: int  # the most KV memory seen in use while the tokens came
    held_bytes_8: int
    others_share: float  # share of the machine's processors that other processes used meanwhile

    @property
    def first_token(self) -> float:
        return median(self.first_token_seconds)

    @property
    def rate_1(self) -> float:
        return median(self.tokens_per_second_1)

    @property
    def rate_8(self) -> float:
        return median(self.tokens_per_second_8)


class BoardCell(msgspec.Struct):
    """The figures of a strategy at a length; the speed is measured last, for all strategies by turns."""

    length: int
    strategy: str
    quality: QualityFigures
    speed: SpeedFigures | None = None


class BoardSetup(msgspec.Struct):
    """How a board is measured. Two runs have the same cells only if all of this is equal."""

    model: str
    digest: str  # changes with the model's files
    version: dict[str, str]  # of kvmux, Python, torch, transformers
    machine: dict[str, Any]
    engine: dict[str, Any]  # dtype, weights, kernels, threads, ...
    strategies: dict[str, dict[str, Any]]  # kind and options by name; the first is exact
    tasks: list[str]
    samples: int  # of each task
    text: dict[str, Any]  # of running text: file, documents, seed, how it is read
    seed: str  # of samples and of the prompts that are timed
    query_aware: bool


class Board(msgspec.Struct):
    """All that has been measured of one model."""

    format: int
    date: str  # of the last cell
    margin: float  # share within which a strategy counts as the same
    setup: BoardSetup
    cells: list[BoardCell]
    non_defaults: dict[str, dict[str, Any]] = {}  # options that are not their kind's defaults, by strategy
    commands: list[str] = []  # that measured its cells

    @property
    def exact(self) -> str:
        """The name of the strategy that the others are compared with."""
        return next(iter(self.setup.strategies))

    @property
    def lengths(self) -> list[int]:
        return sorted({cell.length for cell in self.cells})

    def find_cell(self, length: int, strategy: str) -> BoardCell | None:
        return next((each for each in self.cells if (each.length, each.strategy) == (length, strategy)), None)

    def list_cells(self, length: int) -> list[BoardCell]:
        """Return the cells of a length, in the order of the strategies."""
        found = (self.find_cell(length, name) for name in self.setup.strategies)
        return [cell for cell in found if cell is not None]


def describe_strategy(kind: str, options: Any) -> dict[str, Any]:
    """Return the kind and the options (a pydantic model) of a strategy, as JSON has them."""
    return {"kind": kind, **options.model_dump(mode="json")}


# ---------------------------------------------------------------- the file
def check_board_file(folder: Path) -> None:
    """Raise SettingsError if there is no board in a folder that the settings name, or none that can be opened."""
    try:
        found = (folder / FILE).is_file()
    except OSError as error:
        raise SettingsError(f"board: cannot look into {folder}: {error.strerror}") from None
    if not found:
        raise SettingsError(
            f"board: there is none in {folder.absolute()} (a relative path begins where the server is started): name "
            "the folder of the board, or measure one by `kvmux evaluate --board FOLDER`"
        )


def load_board(folder: Path) -> Board | None:
    """Return the board of a folder, or None if there is none. Raises SettingsError if its file cannot be read."""
    file = folder / FILE
    try:
        board = msgspec.json.decode(file.read_bytes(), type=Board)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SettingsError(f"--board: cannot read {file}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SettingsError(f"--board: {file} is not a board ({error}): name another folder") from None
    if board.format != FORMAT:
        raise SettingsError(f"--board: {file} has format {board.format}, not {FORMAT}: name another folder")
    return board


def encode_board(board: Board) -> bytes:
    return msgspec.json.format(msgspec.json.encode(board), indent=1) + b"\n"


def write_files(folder: Path, contents: dict[str, bytes]) -> None:
    """Replace files of a folder one by one, each as a whole. Raises SettingsError if that fails."""
    with convert_write_errors("--board", folder):
        for name, content in contents.items():
            part = folder / f".{name}.part"
            part.write_bytes(content)
            os.replace(part, folder / name)


def check_same_setup(old: BoardSetup, new: BoardSetup, folder: Path) -> None:
    """Raise SettingsError if a board was measured in another way than a run that would go on with it."""
    was, is_now = msgspec.to_builtins(old), msgspec.json.decode(msgspec.json.encode(new))
    changed = [name for name in is_now if was[name] != is_now[name] or list_keys(was[name]) != list_keys(is_now[name])]
    if not changed:
        return
    listed = "; ".join(_describe_change(name, was[name], is_now[name]) for name in changed)
    raise SettingsError(
        f"--board: {folder} was measured with another setup, and its cells cannot stand beside new ones: {listed}. "
        "Name another folder, or give the same arguments"
    )


def list_keys(value: Any) -> Sequence[str]:
    """Return the keys of a table in their order, which for strategies says which one is exact."""
    return list(value) if isinstance(value, dict) else ()


def _describe_change(name: str, old: Any, new: Any) -> str:
    """Return what is different, for tables only the entries that differ."""
    if not isinstance(old, dict):
        return f"{name}: {old} there, {new} now"
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if not differing:
        return f"{name}: in another order"
    return "; ".join(f"{name} {key}: {old.get(key, 'none')} there, {new.get(key, 'none')} now" for key in differing)
