"""`kvmux evaluate --board` with the embedded model, from the command line to its files; resumption and refusals."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from config.errors import SettingsError
from server.cli.main import main
from server.evaluation.board.data import Board, check_same_setup, encode_board, load_board
from server.evaluation.board.runner import choose_lengths
from server.evaluation.board.speed import TURNS
from server.evaluation.suites.registry import TASKS
from tests.evaluation.board.boards import KIND, RIGHT, make_board, make_quality

SMALL = "paged:k_dtype=int8,v_dtype=int4"
SMALL_NAME = "paged-k_dtypeint8-v_dtypeint4"
FLAGS = ("--suite", "completion", "--samples", "2", "--texts", "1", "--threads", "1", "--lengths", "512")
STRATEGIES = ("--strategy", "paged", "--strategy", SMALL)


def run(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> tuple[int, str, str]:
    try:
        code = main(["evaluate", "--board", str(folder), *FLAGS, *flags])
    except SystemExit as end:
        code = int(str(end.code))
    return (code, *capsys.readouterr())


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "board.json").read_text())
    return found


def interrupt_after(answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C while the answer after so many is scored."""
    task = TASKS["completion"]
    scored: list[str] = []

    def score(answer: str, right: Sequence[str]) -> float:
        scored.append(answer)
        if len(scored) > answers:
            raise KeyboardInterrupt
        return task.score(answer, right)

    monkeypatch.setitem(TASKS, "completion", replace(task, score=score))


def test_a_run_is_interrupted_goes_on_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cell that is there is not measured again; a further run measures nothing, and another one is refused."""
    folder = tmp_path / "new" / "board"
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        code, out, _ = run(capsys, folder, *STRATEGIES)
    assert code == 130
    assert "Interrupted; the same command goes on." in out
    [first] = read(folder)["cells"]
    assert (first["strategy"], first["length"], first["speed"]) == ("paged", 512, None)

    with monkeypatch.context() as patch:
        interrupt_after(2, patch)  # no more than the second cell needs
        code, out, _ = run(capsys, folder, *STRATEGIES)
    assert code == 0
    found = read(folder)
    exact, small = found["cells"]
    assert exact["quality"] == first["quality"]
    assert (exact["strategy"], small["strategy"]) == ("paged", SMALL_NAME) == tuple(found["setup"]["strategies"])
    check_figures(exact, small)
    assert (folder / "board.md").read_text().strip() in out
    assert SMALL_NAME in (folder / "board.html").read_text()

    with monkeypatch.context() as patch:
        interrupt_after(0, patch)
        assert found["non_defaults"] == {"paged": {}, SMALL_NAME: {"k_dtype": "int8", "v_dtype": "int4"}}
        older = {name: value for name, value in found.items() if name != "non_defaults"}
        (folder / "board.json").write_text(json.dumps(older))
        assert main(shlex.split(found["commands"][0])[1:]) == 0
        assert read(folder) == found
        assert run(capsys, folder, *STRATEGIES, "--margin", "5")[0] == 0
    found["margin"] = 0.05
    assert read(folder) == found

    code, out, err = run(capsys, folder, "--strategy", "paged", "--strategy", "paged:k_dtype=int8,v_dtype=int8")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"kvmux: --board: {folder} was measured with another setup")
    assert "strategies paged-k_dtypeint8-v_dtypeint8: none there" in err
    assert read(folder) == found


def check_figures(exact: dict[str, Any], small: dict[str, Any]) -> None:
    for cell in (exact, small):
        assert [len(each) for each in cell["quality"]["tasks"]["completion"].values()] == [2, 2]
        assert {len(each) for each in cell["speed"].values() if isinstance(each, list)} == {TURNS}
        assert all(seconds > 0 for seconds in cell["speed"]["first_token_seconds"])
        assert 7 < cell["speed"]["held_bytes_8"] / cell["speed"]["held_bytes_1"] < 9
        assert cell["speed"]["held_bytes_1"] <= cell["quality"]["kv_bytes"]
    assert (exact["quality"]["exact"], small["quality"]["exact"]) == (True, False)
    assert exact["quality"]["kl_mean"] == 0 < small["quality"]["kl_mean"] < small["quality"]["kl_p99"]


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lengths", "4096"), "--lengths: should be at most 2,048, the context of the model"),
        (("--lengths", "140"), "--lengths: too short for completion"),
        (("--length", "512"), "--length: leave it out with --board"),
        (("--kv-memory", "4MiB", "--lengths", "512"), "raise --kv-memory"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    code, out, err = run(capsys, tmp_path, *STRATEGIES, *flags)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_lengths_are_those_that_the_model_has_room_for() -> None:
    assert choose_lengths([], 32768) == [1024, 4096]
    assert choose_lengths([], 2048) == [1024]
    assert choose_lengths([], 512) == [512]
    assert choose_lengths([300, 200, 300], 512) == [200, 300]
    with pytest.raises(SettingsError, match="at most 512"):
        choose_lengths([200, 513], 512)


def small_board() -> Board:
    return make_board({"exact": make_quality({"easy": RIGHT}), "other": make_quality({"easy": RIGHT})})


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not a board"), ("[]", "is not a board"), ("\udcff", "is not a board"), ('"format": 2', "has format 2")],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    written = encode_board(small_board()).replace(b'"format": 1', content.encode("utf-8", "surrogateescape"))
    (tmp_path / "board.json").write_bytes(written)
    with pytest.raises(SettingsError, match=f"--board: .*{message}.*: name another folder"):
        load_board(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digest": "fe"}, "digest: 0123ef there, fe now"),
        ({"version": {"version": "1.0.0", "torch": "3"}}, "version torch: 2 there, 3 now"),
        ({"samples": 41}, "samples: 40 there, 41 now"),
        ({"strategies": {"other": KIND, "exact": KIND}}, "strategies: in another order"),
        ({"strategies": {"exact": {"kind": "quest"}}}, "strategies exact: .*; strategies other: .* there, none now"),
    ],
)
def test_another_setup_is_refused_with_what_differs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    setup = small_board().setup
    check_same_setup(setup, small_board().setup, tmp_path)
    with pytest.raises(SettingsError, match=message):
        check_same_setup(setup, msgspec.structs.replace(setup, **changes), tmp_path)
