"""`python -m tests.cluster.run`: installs Ray into an environment of its own and runs the tests marked `ray` with it.

The environment (.clients/cluster) finds all other packages in that of this Python. Arguments are pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tests.clients.run import environment
from tests.cluster.ray_cluster import PYTHON_VARIABLE

HERE = Path(__file__).parent


def main(arguments: Sequence[str]) -> int:
    home = environment(HERE)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (own / "kvmux.pth").write_text(sysconfig.get_path("purelib"))
    pytest = [sys.executable, "-m", "pytest", "-m", "ray and not real", str(HERE), *arguments]
    return subprocess.run(pytest, env=os.environ | {PYTHON_VARIABLE: str(home / "bin/python")}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
