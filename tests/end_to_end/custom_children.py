"""Run kvmux with other children than its own, named by import strings.

`python -m tests.end_to_end.custom_children ENGINE WORKER serve ...`

Imports nothing of the engine: the program's other processes import this module too.
"""

from __future__ import annotations

import functools
import sys

from server.cli import main as cli
from server.processes.supervisor import Supervisor, Targets

if __name__ == "__main__":
    targets = Targets(*sys.argv[1:3])
    cli.Supervisor = functools.partial(Supervisor, targets=targets)  # type: ignore[misc,assignment]
    sys.exit(cli.main(sys.argv[3:]))
