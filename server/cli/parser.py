"""Parsers of the command line: errors are one line with a suggestion. Knows no command, and imports nothing heavy."""

from __future__ import annotations

import argparse
import pkgutil
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from config.sources import did_you_mean
from server.processes.child_process import USER_ERROR


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line with a suggestion, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=")[0]
            self.error(f"{name} is not an option{did_you_mean(name, self._option_string_actions)}")
        return known, unknown


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def import_later(target: str, *checks: Callable[[], None]) -> Callable[[dict[str, Any]], int]:
    """Return a function that runs `checks`, imports "module:function", and calls it with a command's options.

    So the code of a command, which may load torch, is imported only if that command runs.
    """

    def run(options: dict[str, Any]) -> int:
        for check in checks:
            check()
        return int(pkgutil.resolve_name(target)(options))

    return run


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[dict[str, Any]], int],
    usage: str,
    *,
    help: str,
    description: str,
    epilog: str = "",
) -> Parser:
    """Add the parser of a command; the dict that `run` gets has only the flags that the user gave."""
    parser = commands.add_parser(
        name,
        usage=f"%(prog)s {usage}",
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def add_command_group(commands: Commands, name: str, usage: str, *, help: str, description: str) -> Commands:
    """Add a command that consists of other commands, and prints its help without one of them; return their parsers."""

    def show_help(options: dict[str, Any]) -> int:
        parser.print_help()
        return USER_ERROR

    parser = add_command(commands, name, show_help, usage, help=help, description=description)
    return parser.add_subparsers(title="commands", metavar="COMMAND", prog=f"kvmux {name}")
