"""`python -m tools.readme_picture`: runs the README's example and draws what the terminal shows, as an SVG.

Starts a server with the example's settings file, runs the example's program, and draws the server's output and the
program's, unchanged but for lines left out at the server's start and the temporary port.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tools.server_process import TERMINATE_TIMEOUT, run_server

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "guide" / "img" / "example.svg"
COLUMNS = 158  # the width of the terminal
ADDRESS = "http://127.0.0.1:8000"  # of the server in the README


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.readme_picture", description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURE, help="file to write (default: the README's picture)")
    options = parser.parse_args(arguments)
    program, config = read_example((ROOT / "README.md").read_text())
    served, printed = run_example(program, config)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        draw_terminal([(f"kvmux serve --config {config}", select_lines(served)), ("python example.py", printed)])
    )


def read_example(readme: str) -> tuple[str, str]:
    """Return the README's program, and the settings file of its server."""
    program = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    config = re.search(r"--config (config/examples/[\w.-]+)", readme)
    assert program is not None
    assert config is not None
    return program[1], config[1]


def run_example(program: str, config: str) -> tuple[str, str]:
    """Return what the server and the program print."""
    with run_server(["--config", config]) as server:
        command = [sys.executable, "-c", program.replace(ADDRESS, server.url)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        server.process.terminate()
        server.process.wait(TERMINATE_TIMEOUT)  # it writes the rest of its log
        served = server.log.read_text()
    return served.replace(server.url, ADDRESS), printed


def select_lines(served: str) -> str:
    """Return the banner and the log's line of each completion."""
    lines = served.splitlines()
    first = next(index for index, line in enumerate(lines) if " serves " in line and "http://" in line)
    banner = lines[first : next(i for i in range(first, len(lines)) if lines[i].startswith("Try it"))]
    completions = [line for line in lines if "POST /v1/completions" in line]
    return "\n".join([*banner, *completions]) + "\n"


def draw_terminal(runs: Sequence[tuple[str, str]]) -> str:
    """Return an SVG of a terminal with commands and what they print. It refers to no fonts on the network."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for command, printed in runs:
        console.print(Text.assemble(("$ ", "green"), (command, "bold")))
        console.print(Text.from_ansi(printed), soft_wrap=False)
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="kvmux"), flags=re.DOTALL)


if __name__ == "__main__":
    main()
