"""The options of `pytest -p plugin_kit.pytest_plugin --pyargs plugin_kit`.

It is no entry point: pytest would then rewrite the assertions of all of kvmux in every run.
"""

from __future__ import annotations

import os
import sys

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("kvmux", "promises of kvmux's plug-ins (pytest --pyargs plugin_kit)")
    group.addoption(
        "--kvmux-strategy",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="strategy or scorer whose promises are tested; may be given several times",
    )
    group.addoption("--kvmux-seed", type=int, metavar="N", help="what the checks draw from (default: new numbers)")


def pytest_configure(config: pytest.Config) -> None:
    """Let classes be imported from the current folder, as `kvmux strategy check` does."""
    if config.getoption("--kvmux-strategy") and (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
