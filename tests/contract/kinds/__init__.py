"""Strategies as plug-ins would be written, for the contract tests: they drop keys, or compute their own attention.

`installed` registers them as installed packages do, by entry points. They use the interface, stores, the arena and the
operations, and are in no way made for the tests: whatever holds for built-in kinds holds for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from importlib.metadata import EntryPoint
from typing import Any
from unittest.mock import patch

from cache_strategies import plugins, registry

KINDS = {
    "hooked": "tests.contract.kinds.hooked:HookedCache",
    "random_drop": "tests.contract.kinds.random_drop:RandomDropCache",
    "random_drop_by_head": "tests.contract.kinds.random_drop:RandomDropByHeadCache",
}


@contextmanager
def installed() -> Iterator[None]:
    """Register the kinds in the `with` block, beside the plug-ins that are installed."""
    ours = [EntryPoint(name, cls, registry.ENTRY_POINT_GROUP) for name, cls in KINDS.items()]

    def entry_points(*, group: str) -> list[Any]:
        return [*_read_installed(group), *(point for point in ours if point.group == group)]

    with patch.object(plugins, "entry_points", entry_points):
        yield


@cache
def _read_installed(group: str) -> list[EntryPoint]:
    """Return the entry points of installed packages, whose files take longer to read than most tests."""
    return list(metadata.entry_points(group=group))
