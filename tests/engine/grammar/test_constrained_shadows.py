"""Shadows of requests that have a grammar: they change no text, and compare the model's own distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.text.vocabulary import Vocabulary
from tests.engine.engine_driver import Driver, strategies
from tests.engine.grammar.constrained import CASES, SETTINGS, compute_alone, read, submit

INSTANCES: dict[str, Any] = strategies(
    paged={"kind": "paged", "block_size": 8}, window={"kind": "sliding_window", "window": 8, "sinks": 2}
)


@pytest.fixture(scope="module")
def alone(model: Path) -> Driver:
    return Driver(model, **SETTINGS)


@pytest.mark.parametrize("candidate", ["contiguous", "window"])
@pytest.mark.parametrize("name", CASES)
def test_a_shadow_of_a_constrained_request(
    model: Path, alone: Driver, vocabulary: Vocabulary, name: str, candidate: str
) -> None:
    driver = Driver(model, **(SETTINGS | {"strategies": INSTANCES}))
    heard = submit(driver, "it", CASES[name], 5, kv_cache="paged")
    driver.shadow("it", candidate)
    driver.run()
    assert CASES[name].accepts(read(vocabulary, heard))
    assert heard.tokens == compute_alone(alone, CASES[name], 5, kv_cache="paged").tokens
    (found,) = driver.fidelities
    assert found.ended_early is None
    assert len(found.kl) == len(heard.tokens)
    if candidate == "contiguous":  # keeps all, so its distributions are the same, also of tokens that were not allowed
        assert found.agreed == [True] * len(heard.tokens)
        assert max(found.kl) < 1e-6
    assert max(found.rank) > 1, "the grammar did not allow the likeliest token everywhere"
    driver.assert_nothing_leaked()
