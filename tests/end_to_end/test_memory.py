"""The engine's resident memory: what texts need is taken as they need it, or all of it before the server is ready."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.end_to_end.server_process import Server, metric, serving

MIB = 2**20
STRATEGIES = ("contiguous", "paged", "sliding_window")
STATES = ("held", "warm", "cold")


def generate(server: Server, tokens: int, texts: int = 1) -> None:
    """Let each strategy generate some texts of so many tokens, all at once."""
    asked = {"prompt": [5, 6, 7], "max_tokens": tokens, "n": texts, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda strategy: server.complete(**asked, kv_cache=strategy), STRATEGIES))
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [texts * tokens] * 3


def read_pool(server: Server) -> dict[str, float]:
    """Return the bytes of KV memory by state."""
    now = server.metrics()
    return {state: metric(now, "kvmux_kv_cache_pool_bytes", state=state) for state in STATES}


def test_memory_is_taken_as_texts_need_it() -> None:
    with serving("--threads", "1", "--kv-memory", "256MiB", "--max-num-seqs", "2048", anew=True) as server:
        before, rss = read_pool(server), server.engine.memory_info().rss
        size = sum(before.values())
        assert size == server.get("/v1/kv_cache").json()["memory"]["bytes"] == 256 * MIB
        assert before["cold"] > 0.9 * size
        generate(server, 100, texts=4)  # more than one of the longest text, whose memory is there from the start
        after = read_pool(server)
        assert sum(after.values()) == size
        assert after["cold"] < before["cold"]
        assert server.engine.memory_info().rss - rss < 64 * MIB


def test_all_of_the_memory_is_there_before_a_server_that_wants_it_so_is_ready() -> None:
    """And then the resident memory does not follow the text: what a strategy needs moves to it from others."""
    flags = "--threads", "1", "--kv-memory", "256MiB", "--max-num-seqs", "2048", "--kv-memory-at-start"
    with serving(*flags, anew=True) as server:
        pool = read_pool(server)
        assert pool["cold"] < MIB
        assert sum(pool.values()) == 256 * MIB
        assert server.engine.memory_info().rss > 255 * MIB
        choice = server.complete(prompt=[5, 6, 7], max_tokens=8, structured_outputs={"choice": ["a"]})  # loads tokens
        assert choice.status_code == 200
        generate(server, 200)
        before = server.engine.memory_info().rss
        generate(server, 500)
        assert server.engine.memory_info().rss - before <= 4 * MIB  # a huge page for each strategy at most
