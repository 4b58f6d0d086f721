"""A strategy that is wrong on purpose, and the random test that must find it. Run by name only, by test_fuzzing.py.

The mistake: what was computed under one salt is found under all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from cache_strategies import registry
from cache_strategies.base import Seat
from cache_strategies.paged.cache import PagedCache
from cache_strategies.types import NO_SALT, Salt
from tests.contract.test_random_histories import instance, machine_of

MENDED, REPLAYED_ONLY = "FUZZING_MENDED", "FUZZING_REPLAYED_ONLY"  # environment variables


class SaltBlind(PagedCache):
    """Forgets whose a prompt is."""

    def open(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, **options: Any) -> Seat | None:
        return super().open(tokens, salt=salt if MENDED in os.environ else NO_SALT, **options)


@pytest.mark.fuzz
def test_any_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTIN, "broken", f"{__name__}:{SaltBlind.__name__}")  # type: ignore[arg-type]
    phases = (Phase.reuse,) if REPLAYED_ONLY in os.environ else (Phase.reuse, Phase.generate)  # the rest takes minutes
    budget = settings(max_examples=100, stateful_step_count=25, phases=phases)
    run_state_machine_as_test(machine_of({"it": instance("broken", block_size=1)}), settings=budget)
