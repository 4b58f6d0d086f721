"""What requests and metrics tell of the checkpoints of a model with recurrent states."""

from __future__ import annotations

from pathlib import Path

from server.engine.info import read_engine_state
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import random_prompt
from tests.engine.stateful_model import loaded_with_states

PAGED = strategies(paged={"kind": "paged", "block_size": 8, "checkpoints": "branches"})


def test_tokens_computed_again_and_checkpoints_are_told(tiny: Path) -> None:
    with loaded_with_states():
        driver = Driver(tiny, strategies=PAGED, max_seq_len=64)
    prompt, changed = random_prompt(50, seed=1), random_prompt(20, seed=2)
    found = []
    for text in (prompt, [*prompt[:30], *changed], [*prompt[:30], *changed[::-1]]):
        heard = driver.submit("it", text, 2, explain=True)
        driver.run()
        assert heard.explained is not None
        record = heard.explained.record
        found.append((record.cached_tokens, record.recomputed_tokens, record.miss))
    assert found == [(0, 0, "cold"), (0, 24, "checkpoint"), (24, 0, "cold")]
    assert [each.recomputed_tokens for step in driver.steps for each in step.report.admissions] == [0, 24, 0]
    state = read_engine_state(driver.engine, {})
    *_, region = driver.core.memory.list_regions("paged")
    assert state.checkpoint_bytes["paged"] == region.num_held * region.size > 0
    assert state.checkpoint_bytes["contiguous"] == 0
