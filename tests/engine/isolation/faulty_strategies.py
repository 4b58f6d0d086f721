"""Two kinds of strategies, as a plug-in brings them, with an option that says which fault each instance has."""

from __future__ import annotations

from typing import Any

from cache_strategies.base import CacheSetup, KVCache
from cache_strategies.contiguous import ContiguousCache, ContiguousOptions
from tests.contract.third_party_strategy import SieveCache, SieveOptions
from tests.engine.isolation.planted_faults import FAULTS

KINDS = {  # as in an entry point
    "faulty": f"{__name__}:FaultyCache",
    "faulty_hook": f"{__name__}:FaultyHookCache",
}


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

    interface_version = 2
    options_type = FaultyOptions

    def __init__(self, setup: CacheSetup, options: Any) -> None:
        is_first = setup.name not in setup.arena._shares
        KVCache.__init__(self, setup, options)  # the base class registers it in the arena
        if options.fails_anew and not is_first:
            setup.arena.allocate(setup.name)
            raise SystemExit("planted")
        super().__init__(setup, options)
        plant(self, options.fault)


class FaultyHookCache(SieveCache):
    """A cache that keeps all tokens and computes its own attention, with a fault."""

    options_type = FaultyHookOptions

    def __init__(self, setup: CacheSetup, options: Any) -> None:
        super().__init__(setup, options)
        plant(self, options.fault)
