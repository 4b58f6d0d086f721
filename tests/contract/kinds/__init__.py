"""Strategies as plug-ins would be written, for the contract tests: they drop keys, or compute their own attention.

`installed` registers them as installed packages do, by entry points. They use the interface, stores, regions and the
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
    """Register the kinds in the `with` block, beside the plug-ins that are installed or registered by others."""
    before = plugins.entry_points
    read = _read_installed if before is metadata.entry_points else before
    ours = [EntryPoint(name, cls, registry.ENTRY_POINT_GROUP) for name, cls in KINDS.items()]

    def entry_points(*, group: str) -> list[Any]:
        return [*read(group=group), *(point for point in ours if point.group == group)]

    with patch.object(plugins, "entry_points", entry_points):
        yield


_read_installed = cache(metadata.entry_points)  # from files of all packages, which takes longer than most tests
