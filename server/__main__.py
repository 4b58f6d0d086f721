"""Makes `python -m server` the command `kvmux`. Imports little, as the server's child processes import it, too."""

import sys


def main() -> int:
    if sys.argv[1:] == ["health"]:  # container health checks run it every few seconds: skip the other imports
        from server.cli.health import check_health

        return check_health()
    from server.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
