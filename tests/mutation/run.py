"""`python -m tests.mutation.run OLD NEW`: compares which faults the tests of two commits find.

Draws mutants (files with one small fault, made by cosmic-ray, which is installed into .clients) from product files
that both commits have, and runs the tests of the mutant's package in a worktree of each commit. A mutant whose tests
pass until the time limit has survived. Outcomes are kept in build/: an interrupted run goes on where it was. Exits with
1 if a mutant that OLD's tests kill survives NEW's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress

from tests.clients.run import environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PRODUCT = ("cache_strategies", "config", "kernels", "loadtest", "plugin_kit", "server")
MARKS = "not slow and not ray and not real"
SPARE = 3  # times as many mutants are drawn as are wanted: a patch may not fit NEW


class Mutant(NamedTuple):
    """A fault in a file, as a patch."""

    name: str
    file: str
    patch: str


class Outcome(NamedTuple):
    """What the tests found in a mutant: "killed", "survived" or "ran out of time"; and the test that killed it."""

    result: str
    test: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run", description=__doc__)
    parser.add_argument("old", help="the commit from whose files mutants are drawn")
    parser.add_argument("new", nargs="?", default="HEAD", help="the commit to compare with it (default: HEAD)")
    parser.add_argument("--count", type=int, default=60, help="number of mutants (default: 60)")
    parser.add_argument("--seed", type=int, help="what draws the mutants (default: another one in each run)")
    parser.add_argument("--limit", type=float, default=60, help="seconds for the tests of a mutant (default: 60)")
    parser.add_argument("--processes", type=int, default=2, help="mutants that are tested at once (default: 2)")
    options = parser.parse_args(arguments)
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    commits = [git("rev-parse", "--short=10", name) for name in (options.old, options.new)]
    print(f"seed {seed}, commits {' and '.join(commits)}")
    mutants = draw(*commits, seed, options.count)
    old, new = (run_all(commit, mutants, seed, options.limit, options.processes) for commit in commits)
    lost = [each for each, before, after in zip(mutants, old, new, strict=True) if is_lost(before, after)]
    for commit, outcomes in zip(commits, (old, new), strict=True):
        counts = {result: [each.result for each in outcomes].count(result) for result in ("killed", "survived")}
        print(f"{commit}: {counts['killed']} of {len(mutants)} mutants killed, {counts['survived']} survived")
    for mutant in lost:
        print(f"--- killed in {commits[0]}, not in {commits[1]}: {mutant.name}\n{mutant.patch}")
    return 1 if lost else 0


def is_lost(before: Outcome, after: Outcome) -> bool:
    return before.result == "killed" != after.result


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


# ---------------------------------------------------------------- mutants
def draw(old: str, new: str, seed: int, count: int) -> list[Mutant]:
    """Draw mutants of files that both commits have; a patch that does not fit the new file is left out."""
    files = sorted(set(list_product(old)) & set(list_product(new)))
    python = environment(HERE) / "bin/python"
    with checkout(old) as ours, checkout(new) as theirs:
        command = [str(python), str(HERE / "draw.py"), str(ours), str(seed), str(SPARE * count), *files]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        mutants = [mutant for each in found if apply(theirs, mutant := Mutant(**each), "--check")]
    assert len(mutants) >= count, f"only {len(mutants)} of {SPARE * count} mutants fit {new}"
    return mutants[:count]


def list_product(commit: str) -> list[str]:
    names = git("ls-tree", "-r", "--name-only", commit, *PRODUCT).splitlines()
    return [name for name in names if name.endswith(".py") and not name.endswith("__init__.py")]


def apply(folder: Path, mutant: Mutant, *flags: str) -> bool:
    """Apply a mutant's patch; return whether it fits. Lines around the change may differ."""
    command = ["git", "apply", "-C1", *flags, "-"]
    file = folder / mutant.file
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()  # which Python would take for that of a file written in the same second
    return subprocess.run(command, cwd=folder, input=mutant.patch, text=True, capture_output=True).returncode == 0


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Make a worktree of a commit, with the compiled kernels of this checkout."""
    with tempfile.TemporaryDirectory(prefix="kvmux-mutants-") as parent:
        folder = Path(parent) / commit
        git("worktree", "add", "--detach", "--force", str(folder), commit)
        try:
            for library in (ROOT / "kernels/cpu").glob("*.so"):
                shutil.copy(library, folder / "kernels/cpu")
            yield folder
        finally:
            git("worktree", "remove", "--force", str(folder))


# ---------------------------------------------------------------- tests
def run_all(commit: str, mutants: Sequence[Mutant], seed: int, limit: float, processes: int) -> list[Outcome]:
    """Run the tests of each mutant's package, as far as build/ has no outcome yet."""
    kept = ROOT / "build" / f"mutants-{seed}-{commit}.json"
    kept.parent.mkdir(exist_ok=True)
    outcomes = {name: Outcome(*each) for name, each in json.loads(kept.read_text() if kept.exists() else "{}").items()}
    left = [mutant for mutant in mutants if mutant.name not in outcomes]
    writing = threading.Lock()

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(f"mutants of {commit}", total=len(left))

        def run_share(number: int) -> None:
            with checkout(commit) as folder:
                for mutant in left[number::processes]:
                    outcome = run_mutant(folder, mutant, seed, limit)
                    with writing:
                        outcomes[mutant.name] = outcome
                        kept.write_text(json.dumps(outcomes, indent=1))
                    progress.advance(task)

        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(run_share, range(processes)))
    return [outcomes[mutant.name] for mutant in mutants]


def run_mutant(folder: Path, mutant: Mutant, seed: int, limit: float) -> Outcome:
    """Run the tests of a mutant's package with its fault, until one fails."""
    fits = apply(folder, mutant)
    assert fits, mutant.name
    command = [sys.executable, "-m", "pytest", "-x", "-m", MARKS, "--seed", str(seed)]
    command += ["--thorough-share", "0.25", str(find_tests(folder, PurePath(mutant.file)))]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return Outcome("ran out of time")
        finally:
            kill_group(process)
            undone = apply(folder, mutant, "--reverse")
            assert undone, mutant.name
        output.seek(0)
        failures = [line for line in output if line.startswith(("FAILED ", "ERROR "))]
    return Outcome("survived") if code in (0, 5) else Outcome("killed", failures[0].strip() if failures else f"{code}")


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and what it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def find_tests(root: Path, file: PurePath) -> Path:
    """Return the folder of tests that mirrors a product file's folder, or the nearest folder above it."""
    parts = file.parent.parts[1:] if file.parts[0] == "server" else file.parent.parts
    for length in range(len(parts), 0, -1):
        folder = root.joinpath("tests", *parts[:length])
        if folder.is_dir():
            return folder
    return root / "tests"


if __name__ == "__main__":
    sys.exit(main())
