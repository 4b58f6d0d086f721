"""Built-in strategies and scorers pass the check that third parties run, with the options that it finds itself."""

from __future__ import annotations

import random

import pytest

from cache_strategies import registry, scorers
from kernels.reference.backend import ReferenceOps
from plugin_kit.cases import PluginCheck

NUM_CASES = 8  # of each class, drawn anew; tests/contract checks all promises of strategies


@pytest.mark.fuzz
@pytest.mark.parametrize("name", sorted([*registry.BUILTIN.values(), *scorers.BUILTIN.values()]))
def test_a_built_in_class_keeps_its_promises(name: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    found = PluginCheck(name, seed, make_ops=ReferenceOps)
    cases = found.list_cases()
    outcomes = [case.find_outcome() for case in random.sample(cases, min(NUM_CASES, len(cases)))]
    assert not [(str(each.case), each.found) for each in outcomes if each.result == "broken"]
    assert any(each.result == "kept" for each in outcomes)


@pytest.mark.parametrize("kind", ["compressed", "sliding_window"])
def test_strategies_that_drop_keys_do_so_in_the_check(kind: str) -> None:
    found = PluginCheck(registry.BUILTIN[kind], 1, make_ops=ReferenceOps)
    assert len(found.variants) > 1
    assert found.find_weakness() is None
