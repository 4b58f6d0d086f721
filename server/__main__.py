"""`python -m server` is `kvmux`. Imports nothing until it is called: the children of the server import it, too."""

import sys


def main() -> int:
    from server.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
