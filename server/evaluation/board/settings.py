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
    lengths: dict[str, list[int]] = {}
    for length in board.lengths:
        if cell := recommend(board, length):
            lengths.setdefault(cell.strategy, []).append(length)
    return [
        SettingsBlock(
            f"Settings for texts up to {' and '.join(f'{length:,}' for length in each)} tokens, with a roll-out that "
            f"moves requests from `{board.exact}` to `{name}` in stages:",
            _format_rollout(board, name, each[-1], folder),
        )
        for name, each in lengths.items()
    ]


def _format_rollout(board: Board, name: str, longest: int, folder: Path) -> str:
    """Return settings with the number format that was measured, and no longer texts if those are not recommended."""
    rollout = {"from": board.exact, "to": name, "guard": "board"}
    limit = {} if longest == board.lengths[-1] else {"max_seq_len": longest}
    settings = {"board": str(folder), "dtype": board.setup.engine["dtype"], **limit, "default_strategy": board.exact}
    notes = [] if limit else [f"# max_seq_len = {longest}  # of longer texts nothing was measured"]
    notes.append('# admin_token = "..."  # to pause, advance or abort the roll-out')
    parts = (
        format_settings(settings) + "\n".join([*notes, ""]),
        format_tables("strategies", {each: _declare(board, each) for each in (board.exact, name)}),
        format_tables("rollouts", {name[:MAX_NAME_LENGTH]: rollout}),
    )
    return "\n".join(parts)


def _declare(board: Board, name: str) -> dict[str, Any]:
    """Return the table of a strategy, which is short if the strategy is the preset of its name."""
    declared = {"kind": board.setup.strategies[name]["kind"], **board.non_defaults[name]}
    return {"preset": name} if name in PRESETS and declared == PRESETS[name].settings else declared
