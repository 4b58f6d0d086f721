"""Kinds of strategies, as a plug-in brings them, with an option that says which fault each instance has.

FaultyPagedCache has none by itself: tests give its subclasses some, for what only paged instances are asked.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from cache_strategies.base import CacheSetup
from cache_strategies.contiguous import ContiguousCache, ContiguousOptions
from cache_strategies.memory import Memory
from cache_strategies.paged.base import PagedOptions
from cache_strategies.paged.cache import PagedCache
from cache_strategies.types import Geometry, Sizes
from tests.contract.third_party_strategy import SieveCache, SieveOptions
from tests.engine.isolation.planted_faults import FAULTS, change_sizes

_BUILT: WeakKeyDictionary[Memory, set[str]] = WeakKeyDictionary()  # names of the instances that were built


def faulty(what: str, **options: Any) -> dict[str, Any]:
    """Return the settings of an instance with a fault of planted_faults.py."""
    name = FaultyHookCache.__name__ if FAULTS[what].hook else FaultyCache.__name__
    return {"kind": f"{__name__}:{name}", "fault": what, **options}


def plant(cache: Any, fault: str) -> None:
    """Plant a fault in a cache, if it has a name."""
    if fault:
        FAULTS[fault].plant(cache)


class FaultyOptions(ContiguousOptions):
    """Options of a FaultyCache."""

    fault: str = ""
    fails_anew: bool = False  # whether __init__ fails when the instance is built again


class FaultyHookOptions(SieveOptions):
    """Options of a FaultyHookCache."""

    fault: str = ""
    keep: int = 1


class FaultyCache(ContiguousCache):
    """A contiguous cache with a fault."""

    interface_version = 3
    options_type = FaultyOptions

    def __init__(self, setup: CacheSetup, options: Any) -> None:
        built = _BUILT.setdefault(setup.memory.shared, set())
        if options.fails_anew and setup.name in built:
            setup.memory.region(64).allocate()
            raise SystemExit("planted")
        built.add(setup.name)
        super().__init__(setup, options)
        plant(self, options.fault)

    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        return change_sizes(super().sizes(options, geometry), options.fault, geometry.max_seq_len)


class FaultyHookCache(SieveCache):
    """A cache that keeps all tokens and computes its own attention, with a fault."""

    options_type = FaultyHookOptions

    def __init__(self, setup: CacheSetup, options: Any) -> None:
        super().__init__(setup, options)
        plant(self, options.fault)


class FaultyPagedOptions(PagedOptions):
    """Options of a FaultyPagedCache."""

    fault: str


class FaultyPagedCache(PagedCache):
    """A paged cache whose subclasses go wrong as `fault` says."""

    interface_version = 3
    options_type = FaultyPagedOptions

    def __init__(self, setup: CacheSetup, options: FaultyPagedOptions) -> None:
        super().__init__(setup, options)
        self.fault = options.fault
