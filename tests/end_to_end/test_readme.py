"""The README's example, run as it stands there against a server with its settings file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.server_process import serving

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"(?P<strategy>\S+) +(?P<answer>\S+) +(?P<kib>\d+) KiB, +(?P<cached>\d+) of (?P<prompt>\d+) prompt")


def test_two_strategies_answer_the_same_prompt() -> None:
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    config = re.search(r"--config (config/examples/\S+)\"", readme)
    assert config is not None
    with serving("--config", str(ROOT / config[1]), "--kv-memory", "128MiB") as server:
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
