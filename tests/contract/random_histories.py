"""Random operations on sequences of several caches in one small memory, drawn and shrunk by hypothesis.

The operations and what they check are those of `plugin_kit/driver/history.py`. What hypothesis found is kept by the
names of the rules and their arguments, so these stay.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_strategies.address_ranges import AddressRanges
from cache_strategies.base import KVCache
from cache_strategies.one_tensor import OneTensor
from cache_strategies.types import NO_SALT, Salt, SaltScope
from config.settings import StrategySettings
from kernels.store import KVStore
from kernels.types import LayerSpec
from plugin_kit.driver.history import History
from plugin_kit.strategies.histories import SCOPES, WINDOW
from tests.cache_strategies.cache_driver import find_cached
from tests.contract import harness
from tests.contract.visible_tokens import define

WINDOWS = (WINDOW, WINDOW)  # as in Mistral 7B


def _find_cached(cache: KVCache, ids: Sequence[int], salt: Salt, max_cached: int | None) -> int:
    return find_cached(cache, ids, salt=salt, max_cached=max_cached)


class Histories(RuleBasedStateMachine):
    """A state machine of random operations. Subclasses choose the instances, the layers and the memory."""

    strategies: Mapping[str, StrategySettings]
    layers: Sequence[LayerSpec]
    memory_bytes: int
    space: type[AddressRanges] | type[OneTensor] | None = None  # None: that of the CPU

    def __init__(self) -> None:
        super().__init__()
        self.history = History(
            self.strategies, self.memory_bytes, harness.make_ops(), define, self.layers, _find_cached, self.space
        )

    # ------------------------------------------------------------ sequences
    @rule(
        which=st.integers(0, 99),
        begin_like=st.integers(0, 99),
        common=st.integers(0, 16),
        rest=st.lists(st.sampled_from([0, 1, 1, -1]), max_size=4),
        salt=st.sampled_from([NO_SALT, NO_SALT, NO_SALT, Salt("tenant", "salt")]),
        max_cached=st.sampled_from([None, None, None, 0, 6]),
        times=st.integers(1, 3),
    )
    def open(
        self, which: int, begin_like: int, common: int, rest: list[int], salt: Salt, max_cached: int | None, times: int
    ) -> None:
        self.history.open(which, begin_like, common, rest, salt, max_cached, times)

    @precondition(lambda self: self.history.open_texts)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        self.history.fork(which)

    @precondition(lambda self: self.history.open_texts)
    @rule(which=st.integers(0, 99), by=st.integers(0, 9))
    def crop(self, which: int, by: int) -> None:
        self.history.truncate(which, by)

    @precondition(lambda self: self.history.open_texts)
    @rule(which=st.integers(0, 99), unsound=st.sampled_from([False, False, False, True]))
    def close(self, which: int, unsound: bool) -> None:
        half_are_finite = patch.object(KVStore, "find_finite_blocks", lambda _, blocks: [b % 2 == 0 for b in blocks])
        with half_are_finite if unsound else contextlib.nullcontext():
            self.history.close(which, spoiled=unsound)

    # ------------------------------------------------------------ what is kept
    @rule(priority=st.integers(0, 2), ttl=st.sampled_from([None, 1e-9, 1e9]))
    def retain(self, priority: int, ttl: float | None) -> None:
        self.history.set_retention(priority, ttl)

    @rule(which=st.integers(0, 99), scope=st.sampled_from(SCOPES))
    def clear(self, which: int, scope: SaltScope) -> None:
        self.history.clear(which, scope)

    @precondition(lambda self: self.history.open_texts)
    @rule(which=st.integers(0, 99), ttl=st.sampled_from([1e-9, 1e9, 1e9]))
    def pin(self, which: int, ttl: float) -> None:
        self.history.pin(which, ttl)

    @precondition(lambda self: self.history.open_texts)
    @rule(which=st.integers(0, 99), chosen=st.integers(0, 99), ttl=st.sampled_from([1e-9, 1e9]))
    def pin_prefix(self, which: int, chosen: int, ttl: float) -> None:
        self.history.pin_prefix(which, chosen, ttl)

    @rule(which=st.integers(0, 99), chosen=st.integers(0, 99))
    def drop_prefix(self, which: int, chosen: int) -> None:
        self.history.drop_prefix(which, chosen)

    @precondition(lambda self: self.history.pins)
    @rule(which=st.integers(0, 99))
    def unpin(self, which: int) -> None:
        self.history.unpin(which)

    # ------------------------------------------------------------ memory
    @rule(which=st.integers(0, 99), percent=st.integers(1, 25))
    def evict(self, which: int, percent: int) -> None:
        self.history.evict(which, percent)

    @rule(which=st.integers(0, 99), floor=st.integers(0, 10), limit=st.integers(0, 120))
    def set_share(self, which: int, floor: int, limit: int) -> None:
        self.history.set_share(which, floor, limit)

    # ------------------------------------------------------------ steps
    @precondition(lambda self: self.history.open_texts)
    @rule(seed=st.integers(0, 2**16))
    def a_few_steps(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(rng.randint(1, 4)):
            self.history.step(rng, fails=False)

    @precondition(lambda self: self.history.open_texts)
    @rule(seed=st.integers(0, 2**16), fails=st.booleans())
    def a_step(self, seed: int, fails: bool) -> None:
        self.history.step(random.Random(seed), fails=fails)

    # ------------------------------------------------------------ always
    @invariant()
    def books_add_up(self) -> None:
        self.history.check_books()

    @invariant()
    def somebody_can_go_on(self) -> None:
        self.history.check_progress()

    def teardown(self) -> None:
        self.history.finish()
