"""`kvmux strategy new` and `kvmux strategy check`: flags and help. What they do is in plugin_kit, imported by name.

Imports nothing heavy, as it comes with every start of the command line.
"""

from __future__ import annotations

from server.cli.parser import Commands, add_command, add_command_group, import_later

DESCRIPTION = """\
For authors of plug-ins: classes of KV-cache strategies, and scorers of keys for the strategy `compressed`.
docs/guide/writing_a_strategy.md describes how to write them."""

CHECK_DESCRIPTION = """\
Checks whether a class keeps the promises of its kind, and says in words which it breaks. The class is imported from
the current folder or from an installed package, and needs no entry point. It is checked with its default options,
with those in its attribute `test_options`, and with smaller ones, so that windows wrap and budgets bite.
The exit code is 0 if all promises are kept, else 1."""

CHECK_EPILOG = """\
examples:
  kvmux strategy check my_package.cache:MyCache
  kvmux strategy check my_package.cache:MyCache --options '{"window": 20}' --options '{"window": 3}'
  kvmux strategy check my_package.cache:MyCache -k replayable --seed 7

The same as tests: pytest -p plugin_kit.pytest_plugin --pyargs plugin_kit --kvmux-strategy my_package.cache:MyCache
"""

NEW_DESCRIPTION = """\
Writes a package into a new folder: one class, which keeps all its promises, an entry point, tests and a README. The
name is that of the package and of its kind, such as my_cache; the folder is then my-cache."""


def add_strategy(commands: Commands) -> None:
    """Add the command with its two commands."""
    parts = add_command_group(
        commands,
        "strategy",
        "new NAME | check MODULE:CLASS",
        help="write a new strategy or scorer, or check whether one keeps its promises",
        description=DESCRIPTION,
    )
    _add_new(parts)
    _add_check(parts)


def _add_new(commands: Commands) -> None:
    parser = add_command(
        commands,
        "new",
        import_later("plugin_kit.command:new"),
        "NAME [--scorer]",
        help="write a package with a new strategy or scorer",
        description=NEW_DESCRIPTION,
    )
    parser.add_argument("name", metavar="NAME", help="name of the package, such as my_cache")
    parser.add_argument("--scorer", action="store_true", help="write a scorer of keys instead of a strategy")


def _add_check(commands: Commands) -> None:
    parser = add_command(
        commands,
        "check",
        import_later("plugin_kit.command:check"),
        "MODULE:CLASS [--options JSON ...] [-k WORDS] [--seed N] [--reference]",
        help="check a strategy or scorer, and say which promises it breaks",
        description=CHECK_DESCRIPTION,
        epilog=CHECK_EPILOG,
    )
    parser.add_argument("plugin", metavar="MODULE:CLASS", help="the class, such as my_package.cache:MyCache")
    parser.add_argument(
        "--options",
        action="append",
        metavar="JSON",
        help="check with these options instead of those found; may be given several times",
    )
    parser.add_argument("-k", dest="words", metavar="WORDS", help="check only promises with these words in their name")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="draw the same random numbers as an earlier check (default: new ones)"
    )
    parser.add_argument(
        "--reference", action="store_true", help="compute in plain torch, instead of with this machine's kernels"
    )
