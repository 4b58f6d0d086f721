"""`kvmux strategy check` on the command line: its report, its exit code, and errors that say what to change."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from plugin_kit.cases import PluginCheck
from plugin_kit.promise import CheckCase
from plugin_kit.report import run_cases
from server.cli import main as cli
from tests.plugin_kit.test_planted_faults import STRATEGIES

ROOT = Path(__file__).parents[2]


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(["strategy", "check", *arguments, "--reference"])
    return code, capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the single line that a wrong command prints."""
    assert cli.main(["strategy", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    return printed.err


def test_the_report_says_in_words_which_promise_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{STRATEGIES}:NeverForks"
    code, report = check(capsys, name, "-k", "fork", "--options", "{}", "--seed", "5")
    assert code == 1
    assert f"{name}, a strategy, with the defaults; seed 5" in report
    assert "  BROKEN  forkable" in report
    assert "fork() returned None although there is memory (options: the defaults)" in report
    assert f"repeat:  kvmux strategy check {name} --options '{{}}' -k forkable --seed 5" in report
    assert "0 promises are kept, 1 are broken." in report


def test_the_report_says_that_a_layer_has_a_window(capsys: pytest.CaptureFixture[str]) -> None:
    _, report = check(capsys, f"{STRATEGIES}:BlindToWindows", "-k", "attends", "--options", "{}")
    assert "layer 1, whose own window is 24 tokens, position" in " ".join(report.split())


def test_one_finding_of_two_cases_is_shown_with_the_first() -> None:
    def fail(rng: random.Random) -> bool:
        raise ValueError("the same")

    cases = [CheckCase("a promise", options, "it holds", 1, fail) for options in ("first", "second")]
    lines: list[str] = []
    run_cases(cases, lines.append, "a:B")
    assert "(options: first)" in lines[0]
    assert "(options: second)" not in lines[0]
    assert "--options first" in lines[0]


def test_a_repeated_check_draws_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (f"{STRATEGIES}:ForgetfulExact", "-k", "any order", "--options", "{}", "--seed", "7")
    reports = [check(capsys, *arguments) for _ in range(2)]
    assert reports[0] == reports[1]


def test_an_error_in_the_class_is_shown_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(capsys, f"{STRATEGIES}:RaisesWhenFull", "-k", "any order", "--options", "{}")
    assert code == 1
    assert "AssertionError: no memory left (faulty_strategies.py, line" in " ".join(report.split())


def test_checks_that_prove_little_are_told() -> None:
    wide = PluginCheck(f"{STRATEGIES}:WindowTooWide", 1, [{"window": 155, "sinks": 0}])
    assert "has dropped no key" in str(wide.find_weakness())
    assert PluginCheck(f"{STRATEGIES}:WindowTooWide", 1).find_weakness() is None
    assert PluginCheck(f"{STRATEGIES}:SoundCache", 1).find_weakness() is None, "an exact class drops nothing"


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("my_cache", "'my_cache' is not a class as MODULE:CLASS"),
        ("keydiff", "not a class as MODULE:CLASS, such as cache_strategies.scorers.keydiff:KeyDiff"),
        ("no_such_module:MyCache", "run the command in the folder that has it, set PYTHONPATH to that"),
        (f"{STRATEGIES}:MyCache", "has no class MyCache"),
        ("pathlib:Path", "is neither a strategy nor a scorer"),
        (f"{STRATEGIES}:NotFinished", "NotFinished does not define locate, sizes, which"),
        (f"{STRATEGIES}:OldVersion", "is written for version 1 of the interface"),
    ],
)
def test_a_class_that_cannot_be_checked(plugin: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error_of(capsys, "check", plugin)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("window=3", "this is not JSON"),
        ("[3]", "this is not a JSON object"),
        ('{"size": 3}', "SoundCache cannot have the options"),
    ],
)
def test_wrong_options(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error_of(capsys, "check", f"{STRATEGIES}:SoundCache", "--options", options)


def test_words_that_no_promise_has(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(capsys, "check", f"{STRATEGIES}:SoundCache", "-k", "speed")
    assert "no promise has 'speed' in its name" in error


def test_a_module_that_cannot_be_imported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_a_cache.py").write_text(
        "import cache_strategies.base\nclass A(cache_strategies.base.Cache): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    error = error_of(capsys, "check", "half_a_cache:A")
    assert "cannot import half_a_cache:A: AttributeError: module 'cache_strategies.base' has no attribute" in error


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["strategy"]) == 2
    assert "check" in capsys.readouterr().out


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest as where kvmux is installed: without this repository's settings, and with the plugin's entry point."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "plugin_kit.pytest_plugin"]
    options = ["-c", "pytest.ini", "--rootdir", str(folder), "--pyargs", "plugin_kit", "-q", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def test_pytest_runs_the_same_checks_and_names_the_seed(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--kvmux-strategy", f"{STRATEGIES}:NeverForks", "--kvmux-seed", "5", "-k", "forkable")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout
    assert "fork() returned None although there is memory" in done.stdout
    assert "seed 5" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "name the class that is to be tested"), (("--kvmux-strategy", "no_module:A"), "cannot import no_module:A")],
)
def test_pytest_says_what_is_missing(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = run_pytest(tmp_path, *arguments)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
