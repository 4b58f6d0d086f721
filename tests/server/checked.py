"""`python -m tests.server.checked serve ...`: kvmux with the engine of tests/server/checked_engine.py.

Imports nothing of the engine: the program's other processes import this module too.
"""

from __future__ import annotations

import functools
import sys

from server import cli
from server.engine.supervisor import Supervisor, Targets

if __name__ == "__main__":
    cli.Supervisor = functools.partial(  # type: ignore[misc,assignment]
        Supervisor, targets=Targets(engine="tests.server.checked_engine:run")
    )
    sys.exit(cli.main())
