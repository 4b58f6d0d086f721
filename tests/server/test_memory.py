"""The engine's resident memory does not follow the text: everything it needs was taken at start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.server.running import Server

MIB = 2**20
STRATEGIES = ("contiguous", "paged", "sliding_window")


def test_rss_rises_at_most_1_mib_in_1000_tokens(tiny: Server) -> None:
    """In all, with a text under each strategy at once."""

    def generate(tokens: int) -> None:
        asked = {"prompt": [5, 6, 7], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda strategy: tiny.complete(**asked, kv_cache=strategy), STRATEGIES))
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [tokens] * 3

    generate(200)
    before = tiny.engine.memory_info().rss
    generate(1000)
    assert tiny.engine.memory_info().rss - before <= 1 * MIB
