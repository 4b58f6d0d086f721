"""`python -m tests.clients.run [NAME ...]`: installs each client into an environment of its own and runs its check.

A client is a folder with requirements.txt and check.py, or with package.json and check.mjs; and with flags.txt if it
wants a server with settings of its own, where {tool_model} is the model of tests/end_to_end/tool_model.py. A check gets
the server's URL and the model's name, and fails by its exit code.
Environments stay in .clients until their requirements change.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tests.end_to_end.server_process import Server, serving
from tests.end_to_end.tool_model import write_tool_model

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".clients"
TOOL_MODEL = "{tool_model}"
SERVER = ("--dtype", "float32", "--threads", "1", "--kv-memory", "256MiB")


def main(arguments: Sequence[str] | None = None) -> int:
    names = sorted(folder.name for folder in HERE.iterdir() if (folder / "check.py").exists() or is_js(folder))
    parser = argparse.ArgumentParser(prog="python -m tests.clients.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", default=names, help=", ".join(names))
    wanted = parser.parse_args(arguments).names
    commands = {name: installed(HERE / name) for name in wanted}
    failed = []
    for flags, names in groupby(sorted(wanted, key=flags_of), key=flags_of):
        with serving(*SERVER, *flags, anew=True) as server:
            failed += [name for name in names if not passes(name, commands[name], server)]
    print(f"{len(wanted) - len(failed)} of {len(wanted)} clients are content" + "".join(f"; not {n}" for n in failed))
    return 1 if failed else 0


def flags_of(name: str) -> list[str]:
    """The flags of the server that a client wants, beside SERVER."""
    file = HERE / name / "flags.txt"
    flags = file.read_text().split() if file.exists() else []
    return [str(write_tool_model(ENVIRONMENTS / "tools")) if flag == TOOL_MODEL else flag for flag in flags]


def is_js(folder: Path) -> bool:
    return (folder / "package.json").exists()


def installed(folder: Path) -> list[str]:
    """The command that runs a client's check."""
    home = environment(folder)
    if is_js(folder):
        shutil.copy(folder / "check.mjs", home)  # node looks for packages beside the file that wants them
        return ["node", str(home / "check.mjs")]
    return [str(home / "bin/python"), str(folder / "check.py")]


def environment(folder: Path) -> Path:
    """The environment that has what a folder pins, installed unless it was before."""
    pins = folder / ("package.json" if is_js(folder) else "requirements.txt")
    home = ENVIRONMENTS / folder.name
    done = home / "installed"  # a copy of the pins, written last
    if not (done.exists() and done.read_text() == pins.read_text()):
        print(f"installing {folder.name} ...", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        install(home, pins)
        shutil.copy(pins, done)
    return home


def install(home: Path, pins: Path) -> None:
    if pins.suffix == ".json":
        shutil.copy(pins, home)
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=home, check=True)
        return
    venv.create(home, with_pip=True)
    pip = [str(home / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", pins], check=True)


def passes(name: str, command: list[str], server: Server) -> bool:
    print(f"--- {name}", flush=True)
    return subprocess.run([*command, server.url, server.model], timeout=900).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
