"""The settings that made-up boards recommend, as a server reads them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from config.presets import PRESETS
from config.settings import Settings, load_settings
from server.evaluation.board.data import Board
from server.evaluation.board.page import PAGE, TABLE, make_files
from server.evaluation.board.settings import list_settings
from server.evaluation.board.verdicts import describe_length, recommend
from tests.evaluation.board.boards import RIGHT, WRONG, make_board, make_quality

FOLDER = Path("boards/mine")
LONG_NAME = "compressed" + "-option" * 20


def make(best: Mapping[int, str], non_defaults: Mapping[str, Mapping[str, Any]]) -> Board:
    """Return a board of the strategies of `non_defaults`, of which the first is exact, and `best[length]` the best."""
    boards = [
        make_board(
            {
                name: make_quality({"easy": WRONG if i and name != best[length] else RIGHT}, kv_bytes=1000 - 100 * i)
                for i, name in enumerate(non_defaults)
            },
            length=length,
        )
        for length in best
    ]
    board = boards[0]
    for other in boards[1:]:
        board.cells += other.cells
    board.setup.strategies = {
        name: {"kind": options.get("kind", "paged"), "block_size": 32, "ttl": None}
        for name, options in non_defaults.items()
    }
    board.non_defaults = {
        name: {option: value for option, value in options.items() if option != "kind"}
        for name, options in non_defaults.items()
    }
    return board


def read(toml: str, tmp_path: Path) -> Settings:
    """Return the settings as a server reads them."""
    file = tmp_path / "kvmux.toml"
    file.write_text(toml)
    return load_settings(file, {})


def test_a_preset_is_named_and_moved_to_by_a_roll_out(tmp_path: Path) -> None:
    presets = {name: dict(PRESETS[name].settings) for name in ("exact", "long", "small")}
    [block] = list_settings(make({1024: "small", 4096: "small"}, presets), FOLDER)
    assert block.title == (
        "Settings for texts up to 1,024 and 4,096 tokens, with a roll-out that moves requests from `exact` to `small` "
        "in stages:"
    )
    assert tomllib.loads(block.toml) == {
        "board": "boards/mine",
        "dtype": "bfloat16",
        "default_strategy": "exact",
        "strategies": {"exact": {"preset": "exact"}, "small": {"preset": "small"}},
        "rollouts": {"small": {"from": "exact", "to": "small", "guard": "board"}},
    }
    settings = read(block.toml, tmp_path)
    assert settings.default_strategy == settings.rollouts["small"].from_ == "exact"
    assert settings.rollouts["small"].guard.board
    assert settings.strategies["small"].options == {"k_dtype": "int8", "v_dtype": "int4"}


@pytest.mark.parametrize("name", ["mine", "small", LONG_NAME])
def test_other_strategies_are_declared_with_the_options_that_are_not_defaults(name: str, tmp_path: Path) -> None:
    """A strategy that has the name of a preset need not be it."""
    options = {"kind": "compressed", "budget": 0.25, "by_head": True, "scorer_options": {"width": 3}}
    [block] = list_settings(make({4096: name}, {"paged": {}, name: options}), FOLDER)
    assert tomllib.loads(block.toml)["strategies"] == {"paged": {"kind": "paged"}, name: options}
    [rollout] = read(block.toml, tmp_path).rollouts.values()
    assert (rollout.from_, rollout.to) == ("paged", name)


def test_each_recommended_strategy_has_settings_of_its_own(tmp_path: Path) -> None:
    board = make({1024: "a", 2048: "b", 4096: "a"}, {"paged": {}, "a": {"kind": "quest"}, "b": {"v_dtype": "int8"}})
    first, second = list_settings(board, FOLDER)
    assert "up to 1,024 and 4,096 tokens," in first.title
    assert "up to 2,048 tokens," in second.title
    settings = [read(each.toml, tmp_path) for each in (first, second)]
    assert settings[0].strategies["a"].kind == "quest"
    assert settings[1].strategies["b"].options == {"v_dtype": "int8"}
    assert [each.max_seq_len for each in settings] == [None, 2048], "no longer texts than it is recommended for"
    files = {name: content.decode() for name, content in make_files(board, FOLDER).items()}
    assert files[TABLE].count(f"```toml\n{first.toml}```") == files[TABLE].count(f"```toml\n{second.toml}```") == 1
    assert files[PAGE].count("[rollouts.") == 2


def test_what_is_recommended_is_what_the_sentence_names() -> None:
    board = make({1024: "a", 4096: "none"}, {"paged": {}, "a": {"kind": "quest"}})
    cell = recommend(board, 1024)
    assert cell is not None
    assert f"`{cell.strategy}` answers as exact caching does" in describe_length(board, 1024)
    assert recommend(board, 4096) is None
    assert "no strategy in less memory" in describe_length(board, 4096)
    assert [each.title[:32] for each in list_settings(board, FOLDER)] == ["Settings for texts up to 1,024 t"]
    board.cells = [each for each in board.cells if each.strategy != "paged"]
    assert list_settings(board, FOLDER) == []
