"""Random tests draw anew, the same again if they must, and what they have found is kept and replayed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzzing.broken_strategy import MENDED, REPLAYED_ONLY
from tests.fuzzing.corpus import Corpus, folder_name

ROOT = Path(__file__).parents[2]
BROKEN = "tests/fuzzing/broken_strategy.py"
PRINTING = "tests/fuzzing/printed_draws.py"
COUNTED = "tests/fuzzing/counted_tests.py"


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the runs within these tests from writing into the cache of the run around them."""
    monkeypatch.setenv("PYTEST_ADDOPTS", f"-o cache_dir={tmp_path_factory.mktemp('pytest_cache')}")


def run(module: str, *arguments: str, **environment: str) -> tuple[int, str]:
    """Return the exit code and what is printed."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=280
    )
    return done.returncode, done.stdout + done.stderr


def test_a_broken_strategy_is_found_kept_and_replayed(tmp_path: Path) -> None:
    corpus = f"--corpus={tmp_path}"
    code, printed = run("pytest", BROKEN, corpus, **{REPLAYED_ONLY: "1"})
    assert code == 0, printed  # nothing is kept yet
    code, printed = run("tests.fuzzing", "--seconds", "200", BROKEN, corpus)
    assert code == 1, printed
    (seed,) = re.findall(r"drew from --seed (\d+)", printed)
    assert re.search(rf"round \d+: --seed {seed}$", printed, re.MULTILINE)
    kept = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert kept
    code, printed = run("pytest", BROKEN, corpus, **{REPLAYED_ONLY: "1"})
    assert code == 1, "the failure was not replayed"
    code, printed = run("pytest", BROKEN, corpus, **{REPLAYED_ONLY: "1", MENDED: "1"})
    assert code == 0, printed
    assert kept == [file for file in tmp_path.rglob("*") if file.is_file()], "what was mended may break again"


def test_each_run_draws_anew_and_with_a_seed_the_same() -> None:
    def drawn(*arguments: str) -> str:
        code, printed = run("pytest", PRINTING, "-s", *arguments)
        assert code == 0, printed
        (numbers,) = re.findall(r"drawn: (.*)", printed)
        return str(numbers)

    assert drawn() != drawn()
    beside = "tests/config/test_settings.py"  # which imports modules with constants that Hypothesis might draw
    assert drawn("--seed=7") == drawn("--seed=7", beside)


def test_a_share_of_the_thorough_tests_is_drawn_by_the_seed() -> None:
    def collect(target: str, *arguments: str) -> set[str]:
        code, printed = run("pytest", target, "--collect-only", "--verbose", "--verbose", *arguments)
        assert code == 0, printed
        return {*re.findall(r"<Function (.*)>", printed)}

    every = collect(COUNTED)
    first, again, other = (collect(COUNTED, "--thorough-share", "0.5", "--seed", seed) for seed in ("7", "7", "8"))
    assert first == again
    assert first < every
    assert first != other < every
    one = min(every - first)
    assert collect(f"{COUNTED}::{one}", "--thorough-share", "0") == {one}, "a named test always runs"


def test_processes_draw_the_same_share_and_a_second_run_runs_the_rest() -> None:
    def list_passed(*arguments: str) -> list[str]:
        code, printed = run("pytest", COUNTED, "--verbose", "--verbose", *arguments)
        assert code == 0, printed
        found = re.findall(r"(counted_tests\.py::\S+) PASSED|PASSED \S*(counted_tests\.py::\S+)", printed)
        return [first or second for first, second in found]

    every = list_passed()
    assert len(every) > 40, "or none might be drawn"
    drawn = list_passed("-n", "2", "--dist", "loadfile", "--thorough-share", "0.5")
    rest = list_passed("-n", "2", "--dist", "loadfile", "--thorough-rest")
    assert drawn
    assert rest
    assert sorted(drawn + rest) == sorted(every)


def test_fuzzing_ends_in_time_and_passes_where_nothing_fails(tmp_path: Path) -> None:
    arguments = ("--seconds", "1", "--seed", "5", BROKEN, f"--corpus={tmp_path}")
    code, printed = run("tests.fuzzing", *arguments, **{MENDED: "1"})
    assert code == 0, printed
    assert "round 1: --seed 5" in printed
    assert "nothing failed in 1 rounds" in printed
    assert not list(tmp_path.iterdir())


def test_every_random_test_draws_anew() -> None:
    """A history that is meant to be fixed is an `@example`."""
    for file in (ROOT / "tests").rglob("*.py"):
        if file.parent != Path(__file__).parent:
            assert not re.search(r"derandomize|database=None", file.read_text()), file


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/a.py::test_it[one] (call)")
    return Corpus(tmp_path)


def test_an_example_stays_until_a_smaller_one_takes_its_place(corpus: Corpus) -> None:
    corpus.save(b"key", b"large")
    corpus.delete(b"key", b"large")
    assert list(corpus.fetch(b"another key, as the source has changed")) == [b"large"]
    corpus.save(b"key", b"small")
    corpus.move(b"key", b"key.secondary", b"large")
    assert list(corpus.fetch(b"key")) == [b"small"]
    corpus.save(b"key.pareto", b"a note")
    assert not list(corpus.fetch(b"key.pareto"))
    assert list(corpus.fetch(b"key")) == [b"small"]


def test_tests_have_folders_of_their_own(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus.save(b"key", b"one")
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/a.py::test_it[two] (call)")
    assert not list(corpus.fetch(b"key"))
    names = [folder_name(f"tests/a.py::test_it[{'x' * 200}{i}]") for i in range(3)]
    assert len(set(names)) == 3
    assert all(len(name) < 100 for name in names)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    corpus = Corpus(tmp_path / "file")
    corpus.save(b"key", b"it")
    corpus.move(b"key", b"key.secondary", b"it")
    assert not list(corpus.fetch(b"key"))
