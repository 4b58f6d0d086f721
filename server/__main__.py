"""`python -m server` is `kvmux`. Imports nothing until it is called: the children of the server import it, too."""

import sys


def main() -> int:
    if sys.argv[1:] == ["health"]:  # it runs again and again beside a server that computes: without all the rest
        from server.cli.health import check_health

        return check_health()
    from server.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
