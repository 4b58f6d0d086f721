"""`python -m tests.server.checked serve ...`: kvmux with the engine of tests/server/checked_engine.py.

Imports nothing of the engine: the program's other processes import this module too.
"""

from __future__ import annotations

import functools
import sys

from server import cli
from server.engine.supervisor import Supervisor, Targets


def main(engine: str) -> None:
    targets = Targets(engine=engine)
    cli.Supervisor = functools.partial(Supervisor, targets=targets)  # type: ignore[misc,assignment]
    sys.exit(cli.main())


if __name__ == "__main__":
    main("tests.server.checked_engine:run")
