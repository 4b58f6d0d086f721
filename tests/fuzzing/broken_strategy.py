"""A strategy that is wrong on purpose, and the random test that must find it. Run by name only, by test_fuzzing.py.

The mistake: what was computed under one salt is found under all.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from cache_strategies import registry
from cache_strategies.paged.cache import PagedCache, PagedSequence
from cache_strategies.spaces import find_space
from cache_strategies.types import NO_SALT, Text
from plugin_kit.driver.history import LAYERS
from tests.contract.test_random_histories import instance, machine_of

MENDED, REPLAYED_ONLY = "FUZZING_MENDED", "FUZZING_REPLAYED_ONLY"  # environment variables


class SaltBlind(PagedCache):
    """Forgets whose a prompt is."""

    def open(self, text: Text) -> PagedSequence | None:
        return super().open(text if MENDED in os.environ else text._replace(salt=NO_SALT))


@pytest.mark.fuzz
def test_any_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTIN, "broken", f"{__name__}:{SaltBlind.__name__}")  # type: ignore[arg-type]
    phases = (Phase.reuse,) if REPLAYED_ONLY in os.environ else (Phase.reuse, Phase.generate)  # the rest takes minutes
    budget = settings(max_examples=100, stateful_step_count=25, phases=phases)
    machine = machine_of({"it": instance("broken", block_size=1)}, LAYERS, find_space("cpu"))
    run_state_machine_as_test(machine, settings=budget)
