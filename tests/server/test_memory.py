"""The engine's resident memory does not follow the text: everything it needs was taken at start."""

from __future__ import annotations

import pytest

from tests.server.running import Server

MIB = 2**20


@pytest.mark.parametrize("strategy", ["contiguous", "paged", "sliding_window"])
def test_rss_rises_at_most_1_mib_in_1000_tokens(tiny: Server, strategy: str) -> None:
    def generate(tokens: int) -> None:
        answer = tiny.complete(prompt=[5, 6, 7], max_tokens=tokens, temperature=0, ignore_eos=True, kv_cache=strategy)
        assert answer.json()["usage"]["completion_tokens"] == tokens

    generate(200)
    before = tiny.engine.memory_info().rss
    generate(1000)
    assert tiny.engine.memory_info().rss - before <= 1 * MIB
