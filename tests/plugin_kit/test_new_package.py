"""`kvmux strategy new`: what it writes installs, keeps its promises, and is clean by ruff and mypy."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from server.cli import main as cli

ROOT = Path(__file__).parents[2]
KINDS = {"strategy": (), "scorer": ("--scorer",)}


@pytest.fixture(params=KINDS)
def package(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a new package."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["strategy", "new", "my_plugin", *KINDS[request.param]]) == 0
    return tmp_path / "my-plugin"


def what_of(package: Path) -> str:
    return "scorer" if (package / "my_plugin" / "scorer.py").exists() else "strategy"


def make_environment(folder: Path) -> Path:
    """Return the Python of a new virtual environment that finds the packages of this one, and this checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    here = sysconfig.get_path("purelib")
    Path(purelib, "parent.pth").write_text(f"{ROOT}\nimport site; site.addsitedir({here!r})\n")
    return python


def run(command: Sequence[str | Path], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_what_is_written_installs_is_found_and_keeps_its_promises(package: Path, tmp_path: Path) -> None:
    python, what = make_environment(tmp_path / "venv"), what_of(package)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
    ]
    run([*pip, "--editable", "."], package)
    finder = "registry.list_kinds" if what == "strategy" else "scorers.list_scorers"
    found = run([python, "-c", f"from cache_strategies import registry, scorers; print({finder}())"], tmp_path)
    assert f"'my_plugin': 'my_plugin.{what}:MyPlugin'" in found
    report = run([python, "-m", "server", "strategy", "check", f"my_plugin.{what}:MyPlugin"], tmp_path)
    assert "0 are broken" in report
    assert "Note" not in report, "it drops keys in these texts"


def test_its_own_tests_pass(package: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "attends or replayable or pure"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{package}"}
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.slow  # needs the checkers, which `make test` does not install
def test_ruff_and_mypy_find_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ruff", reason="needs the checkers: make check")
    monkeypatch.chdir(tmp_path)
    for what, flags in KINDS.items():
        assert cli.main(["strategy", "new", f"my_{what}", *flags]) == 0
    config = ["--config", str(ROOT / "pyproject.toml")]
    run([sys.executable, "-m", "ruff", "check", *config, "."], tmp_path)
    run([sys.executable, "-m", "ruff", "format", "--check", *config, "."], tmp_path)
    pytest.importorskip("mypy")
    paths = ":".join(str(path) for path in (ROOT, tmp_path / "my-strategy", tmp_path / "my-scorer"))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "-p",
        "my_strategy",
        "-p",
        "my_scorer",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "MYPYPATH": paths}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_names_of_project_package_and_class_follow_from_one_name(package: Path) -> None:
    pyproject = (package / "pyproject.toml").read_text()
    assert 'name = "my-plugin"' in pyproject
    assert f'my_plugin = "my_plugin.{what_of(package)}:MyPlugin"' in pyproject
    files = {str(file.relative_to(package)) for file in package.rglob("*") if file.is_file()}
    expected = {"pyproject.toml", "README.md", "tests/test_promises.py"}
    assert files == expected | {f"my_plugin/{name}" for name in ("__init__.py", "py.typed", f"{what_of(package)}.py")}
    assert all("$" not in (package / file).read_text() for file in files)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my cache", "cannot be the name of a Python package"),
        ("My_Cache", "cannot be the name of a Python package"),
        ("2cache", "cannot be the name of a Python package"),
        ("../cache", "cannot be the name of a Python package"),
        ("class", "cannot be the name of a Python package"),
        ("server", "would be in the way of another one"),
        ("taken", "exists; choose another name"),
    ],
)
def test_names_that_are_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    assert cli.main(["strategy", "new", name]) == 2
    assert message in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]
