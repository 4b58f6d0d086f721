"""`python -m tests.server.checked serve ...`: kvmux with an engine of checked_engine.py, or another worker.

Imports nothing of the engine: the program's other processes import this module too.
"""

from __future__ import annotations

import functools
import sys

from server import cli
from server.engine.supervisor import Supervisor, Targets


def main(**targets_: str) -> None:
    targets = Targets(**targets_)
    cli.Supervisor = functools.partial(Supervisor, targets=targets)  # type: ignore[misc,assignment]
    sys.exit(cli.main())


if __name__ == "__main__":
    main(engine="tests.server.checked_engine:run")
