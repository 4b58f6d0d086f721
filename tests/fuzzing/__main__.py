"""`make fuzz`: every random test again and again, each round with another seed, until something fails or time is over.

Knows rounds and seconds; what a failing test leaves is in corpus.py.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RANDOM = "(fuzz or hypothesis) and not slow"  # marks; hypothesis adds its own
TEST_SECONDS = 1800  # that a test may take which has found something and looks for a smaller example
LEAST_SECONDS = 10.0  # of a round: less is not worth loading the libraries again


def main(arguments: Sequence[str] | None = None) -> int:
    """Run rounds; return 1 if a test failed, else 0, or what pytest returned if it could not run."""
    options, more = parsed(arguments)
    began, rounds = time.time(), 0
    until = began + options.seconds
    seed: int | None = options.seed
    while not rounds or until - time.time() > LEAST_SECONDS:
        seed = random.SystemRandom().randrange(2**32) if seed is None or rounds else seed
        rounds += 1
        print(f"round {rounds}: --seed {seed}", flush=True)
        if failed := run(seed, until, options.files or random_files(seed), more):
            print(f"round {rounds}, --seed {seed}: something failed after {time.time() - began:.0f} s", flush=True)
            return failed
    print(f"nothing failed in {rounds} rounds of {time.time() - began:.0f} s")
    return 0


def parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return our options, and others, which are pytest's."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no test starts (default: 600)")
    parser.add_argument("--seed", type=int, help="of the first round (default: another one each time)")
    parser.add_argument("files", nargs="*", help="of tests (default: all random ones, in another order in each round)")
    return parser.parse_known_args(arguments)


def random_files(seed: int) -> list[str]:
    """Return the files that have random tests, in an order that the seed says: time may be over before the last."""
    files = [f for f in sorted((ROOT / "tests").rglob("test_*.py")) if re.search("hypothesis|mark.fuzz", f.read_text())]
    random.Random(seed).shuffle(files)
    return [str(file.relative_to(ROOT)) for file in files]


def run(seed: int, until: float, files: Sequence[str], more: Sequence[str]) -> int:
    """Run a round; return pytest's exit code."""
    how = ["-m", RANDOM, f"--timeout={TEST_SECONDS}", f"--seed={seed}", f"--until={until}"]
    command = [sys.executable, "-m", "pytest", *how, *more, *files]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
