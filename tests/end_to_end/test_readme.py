"""The README's example, run as it stands there against a server with its settings file."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.server_process import serving

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"(?P<strategy>\S+) +(?P<answer>\S+) +(?P<kib>\d+) KiB, +(?P<cached>\d+) of (?P<prompt>\d+) prompt")


def test_two_strategies_answer_the_same_prompt() -> None:
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    config = re.search(r"--config (config/examples/\S+)\"", readme)
    assert config is not None
    with serving("--config", str(ROOT / config[1]), "--kv-memory", "128MiB", anew=True) as server:
        program = code.replace("http://127.0.0.1:8000", server.url)
        printed = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120
        ).stdout
    cold, warm, window = (match.groupdict() for match in LINE.finditer(printed))
    assert cold["answer"] == warm["answer"] == "tower."
    assert window["answer"] != "tower."
    assert (cold["cached"], window["cached"]) == ("0", "0")
    assert int(warm["cached"]) >= int(warm["prompt"]) - 32
    assert 8 * int(window["kib"]) < int(cold["kib"])


def test_what_the_readme_prints_is_one_of_its_runs() -> None:
    """Its lines have the form that the program prints, in the same order."""
    lines = list(LINE.finditer((ROOT / "README.md").read_text()))
    assert [line["strategy"] for line in lines] == ["paged", "paged", "window-64"]


def test_the_test_command_runs_as_it_stands_there(tmp_path: Path) -> None:
    """Its processes collect the same tests, here of one folder, and the first ones pass; then it is ended."""
    (command,) = re.findall(r"^ {4}(make test)(?= +#|$)", (ROOT / "README.md").read_text(), re.MULTILINE)
    if subprocess.run(["make", "--question", ".venv/.with-test"], cwd=ROOT, env=_environment(), check=False).returncode:
        pytest.skip("`make test` would install something first, as these tests run in another environment than its own")
    options = f"-o cache_dir={tmp_path} -o testpaths=tests/cache_strategies"
    environment = _environment() | {"PYTHONUNBUFFERED": "1", "PYTEST_ADDOPTS": options}
    process = subprocess.Popen(
        shlex.split(command), cwd=ROOT, env=environment, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        printed = ""
        while not re.search(r"^\.{20}", printed, re.MULTILINE):  # 20 tests have passed
            part = os.read(process.stdout.fileno(), 2**16).decode()
            assert part, printed
            printed += part
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _environment() -> dict[str, str]:
    """Return the environment without the variables of a `make` around the tests, which another one would take over."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))}
