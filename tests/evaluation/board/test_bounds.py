"""The bounds that a board gives the roll-outs of an engine, and the boards and roll-outs that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from config.errors import SettingsError
from server.engine.info import compute_digest
from server.engine.ipc.messages import BoardBounds
from server.evaluation.board.bounds import read_board_bounds
from server.evaluation.board.data import Board, describe_strategy, encode_board
from tests.engine.engine_driver import Driver
from tests.evaluation.board.boards import RIGHT, WRONG, make_board, make_quality

INT8 = {"kind": "paged", "k_dtype": "int8", "v_dtype": "int8"}
STRATEGIES = {"small": {"preset": "small"}, "int8": INT8, "window": {"kind": "sliding_window", "window": 64}}
ROLLOUT = {"from": "paged", "to": "small", "guard": "board"}


def measure(directory: Path, folder: Path, **changes: Any) -> Board:
    """Write a board of the model in `directory`: exact caching, small, int8, and a window that answers worse."""
    engine = Driver(directory, strategies=STRATEGIES).engine
    right = {"easy": RIGHT}
    names = {
        "exact": ("paged", make_quality(right, exact=True)),
        "eight": ("int8", make_quality(right, kl=1e-5)),
        "mixed": ("small", make_quality(right, kl=0.01)),
        "short": ("window", make_quality({"easy": WRONG}, kl=0.5)),
    }
    board = make_board({name: quality for name, (_, quality) in names.items()})
    declared = {each.name: each for each in engine.instances}
    board.setup.digest = compute_digest([], engine.model_dir)
    board.setup.strategies = {
        name: describe_strategy(declared[instance].kind, declared[instance].options)
        for name, (instance, _) in names.items()
    }
    board.setup.engine = {"dtype": "float32", "weights": "float32", "device": "cpu", "kernels": engine.kernels.backend}
    board.setup.engine |= changes
    folder.mkdir()
    (folder / "board.json").write_bytes(encode_board(board))
    return board


def read(directory: Path, folder: Path, **settings: Any) -> BoardBounds:
    given: dict[str, Any] = {"strategies": STRATEGIES, "board": str(folder)}
    found = read_board_bounds(Driver(directory, **(given | settings)).engine)
    assert found is not None
    return found


def test_bounds_are_what_was_measured_with_room_for_other_texts(model_directory: Path, tmp_path: Path) -> None:
    """Strategies are found by their options. The cells of `make_board` are faster than exact caching, one by one."""
    board = measure(model_directory, tmp_path / "board")
    slow = board.cells[2].speed
    assert slow is not None
    slow.first_token_seconds, slow.tokens_per_second_8 = [1.2] * 3, [15.0] * 3  # 0.6 and 30 of exact caching
    (tmp_path / "board" / "board.json").write_bytes(encode_board(board))
    found = read(model_directory, tmp_path / "board")
    same = {"top1": pytest.approx(1 - 3 * (1 - 0.987654), abs=1e-5)}
    assert found.bounds["small"] == same | {"kl_mean": 0.03, "kl_p99": 0.21, "ttft_p95_ratio": 4, "itl_p95_ratio": 3}
    least = {"kl_mean": 0.015, "kl_p99": 0.15, "ttft_p95_ratio": 2, "itl_p95_ratio": 1.5}
    assert found.bounds["int8"] == found.bounds["paged"] | same == least | same
    assert {"paged", "contiguous"} <= set(found.exact)


def test_times_of_another_device_or_other_kernels_are_no_bounds(model_directory: Path, tmp_path: Path) -> None:
    measure(model_directory, tmp_path / "board", kernels="others")
    assert read(model_directory, tmp_path / "board").bounds["small"].keys() == {"kl_mean", "kl_p99", "top1"}


def test_only_lengths_count_that_requests_may_have(model_directory: Path, tmp_path: Path) -> None:
    """A longer text diverges more; a strategy that is not measured there, or answers worse, has no bounds for it."""
    board = measure(model_directory, tmp_path / "board")
    longest = [msgspec.structs.replace(cell, length=8192) for cell in board.cells]
    longest[2].quality = make_quality({"easy": RIGHT}, kl=0.1)
    longest[1].quality = make_quality({"easy": WRONG})
    for cell in board.cells:
        cell.length = 64
    board.cells += longest[:3]
    (tmp_path / "board" / "board.json").write_bytes(encode_board(board))
    found = read(model_directory, tmp_path / "board", max_seq_len=64)
    assert found.bounds["small"]["kl_mean"] == 0.03
    assert "int8" in found.bounds
    found = read(model_directory, tmp_path / "board", max_seq_len=128)
    assert found.bounds["small"]["kl_mean"] == 0.3
    assert "int8" in found.refusals
    assert "is not measured to its end for short" in found.refusals["window"]


def test_an_engine_that_comes_back_starts_without_the_board(
    model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Driver(model_directory, strategies=STRATEGIES, board=str(tmp_path / "gone")).engine
    assert read_board_bounds(engine, is_restart=True) is None
    assert "roll-outs keep the bounds that they have" in caplog.text


def test_without_a_board_there_are_none(model_directory: Path) -> None:
    assert read_board_bounds(Driver(model_directory).engine) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to": "window"}, r"'window' answers worse than exact caching \(easy: 100% and 0% at 4,096 tokens\)"),
        ({"to": "contiguous"}, "no strategy with the options of 'contiguous'; it has exact, eight, mixed, short"),
        ({"from": "int8"}, "compares with exact caching, which 'int8' is not"),
    ],
)
def test_a_roll_out_without_bounds_is_refused(
    model_directory: Path, tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    measure(model_directory, tmp_path / "board")
    with pytest.raises(SettingsError, match=rf"rollouts\.r\.guard: .*{message}"):
        read(model_directory, tmp_path / "board", rollouts={"r": ROLLOUT | changes})
    read(model_directory, tmp_path / "board", rollouts={"r": ROLLOUT | changes | {"guard": {}}})


def test_boards_of_other_models_and_formats_are_refused(model_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"board: there is none in .*: name the folder of the board"):
        read(model_directory, tmp_path / "board")
    board = measure(model_directory, tmp_path / "board", dtype="bfloat16")
    with pytest.raises(SettingsError, match="was measured with dtype bfloat16, not float32"):
        read(model_directory, tmp_path / "board")
    board.setup.digest = "another"
    (tmp_path / "board" / "board.json").write_bytes(encode_board(board))
    with pytest.raises(SettingsError, match="was measured with model <1>, whose files are not those of"):
        read(model_directory, tmp_path / "board")
