"""Installs a program in a folder with an environment of its own, and keeps it for the next time.

A folder is complete once it has the file MARK, which is written last. Steps write to install.log in the folder. What
the steps are is in a file for each program, such as llama_cpp.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.server_process import start_process

MARK = "installed"
STEP_TIMEOUT = 3600.0  # seconds that a step may take; two cores build llama.cpp in 20 minutes
LOG_LINES = 4  # last lines of a failed step's output that its error message has


def parse_folder(text: str) -> Path:
    """Return the absolute path of a folder: the steps of an installation run in another one."""
    return Path(text).expanduser().absolute()


class InstallError(Exception):
    """A server cannot be installed; the message says which step failed, and how."""


@dataclass(frozen=True)
class Installer:
    """Runs the steps of an installation in a folder, and shows which one runs."""

    folder: Path
    pip_args: Sequence[str]  # further arguments of every `pip install` and `pip download`
    show_status: Callable[[str], None]

    @property
    def python(self) -> Path:
        """The path of the Python of the folder's virtual environment."""
        return self.folder / "venv" / "bin" / "python"

    def ensure(self, install: Callable[[Installer], None], version: str) -> None:
        """Install a version unless the folder has it already. Raises InstallError and OSError."""
        mark = self.folder / MARK
        if mark.exists() and mark.read_text() == version:
            return
        shutil.rmtree(self.folder, ignore_errors=True)  # another version, or what an interrupted installation left
        self.folder.mkdir(parents=True)
        self.run("virtual environment", [sys.executable, "-m", "venv", str(self.folder / "venv")])
        install(self)
        mark.write_text(version)

    def run(self, step: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Run a command and append its output to the log. Raises InstallError."""
        self.show_status(f"{self.folder.name}: {step}")
        log = self.folder / "install.log"
        with log.open("a") as output:
            how = {
                "stdout": output,
                "stderr": subprocess.STDOUT,
                "cwd": self.folder,
                "env": {**os.environ, **(env or {})},
            }
            with start_process(command, **how) as process:
                try:
                    code = process.wait(STEP_TIMEOUT)
                except subprocess.TimeoutExpired:
                    raise InstallError(f"{step} took more than {STEP_TIMEOUT:g} seconds; see {log}") from None
        if code:
            last = " / ".join(line.strip() for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise InstallError(f"{step} failed: {last}")

    def pip(self, step: str, *arguments: str) -> None:
        extra = self.pip_args if arguments[0] in ("install", "download") else ()
        self.run(step, [str(self.python), "-m", "pip", *arguments, *extra])
