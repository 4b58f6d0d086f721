"""Writes the settings with which a server moves requests to the strategies that a board recommends.

Knows presets and the form of a settings file, but no kind of strategy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from config.presets import PRESETS
from config.settings_file import format_settings, format_tables
from server.evaluation.board.data import Board
from server.evaluation.board.verdicts import recommend

MAX_NAME_LENGTH = 100  # of a roll-out


class SettingsBlock(NamedTuple):
    """Settings to be copied, and a sentence that says what they are for."""

    title: str
    toml: str


def list_settings(board: Board, folder: Path) -> list[SettingsBlock]:
    """Return settings for each strategy that the board in a folder recommends at one or more lengths."""
    lengths: dict[str, list[str]] = {}
    for length in board.lengths:
        if cell := recommend(board, length):
            lengths.setdefault(cell.strategy, []).append(f"{length:,}")
    return [
        SettingsBlock(
            f"Settings for texts up to {' and '.join(each)} tokens, with a roll-out that moves requests from "
            f"`{board.exact}` to `{name}` in stages:",
            _format_rollout(board, name, folder),
        )
        for name, each in lengths.items()
    ]


def _format_rollout(board: Board, name: str, folder: Path) -> str:
    rollout = {"from": board.exact, "to": name, "guard": "board"}
    parts = (
        format_settings({"board": str(folder), "default_strategy": board.exact}),
        format_tables("strategies", {each: _declare(board, each) for each in (board.exact, name)}),
        format_tables("rollouts", {name[:MAX_NAME_LENGTH]: rollout}),
    )
    return "\n".join(parts)


def _declare(board: Board, name: str) -> dict[str, Any]:
    """Return the table of a strategy, which is short if the strategy is the preset of its name."""
    declared = {"kind": board.setup.strategies[name]["kind"], **board.get_options(name)}
    return {"preset": name} if name in PRESETS and declared == PRESETS[name].settings else declared
