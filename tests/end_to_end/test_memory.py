"""The engine's resident memory does not follow the text: everything it needs was taken at start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.end_to_end.server_process import Server, metric, serving

MIB = 2**20
STRATEGIES = ("contiguous", "paged", "sliding_window")


def test_rss_rises_at_most_1_mib_in_1000_tokens(tiny: Server) -> None:
    """In all, with a text under each strategy at once."""

    def generate(tokens: int) -> None:
        asked = {"prompt": [5, 6, 7], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda strategy: tiny.complete(**asked, kv_cache=strategy), STRATEGIES))
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [tokens] * 3

    tiny.wait_for_memory()
    choice = tiny.complete(prompt=[5, 6, 7], max_tokens=8, structured_outputs={"choice": ["a"]})  # waits for the tokens
    assert choice.status_code == 200
    generate(200)
    before = tiny.engine.memory_info().rss
    generate(1000)
    assert tiny.engine.memory_info().rss - before <= 1 * MIB


def test_all_of_the_memory_comes_while_requests_run() -> None:
    flags = "--threads", "1", "--kv-memory", "256MiB", "--max-num-seqs", "2048"
    with serving(*flags, anew=True) as server:
        tokens = 0
        while server.metric("kvmux_kv_cache_pool_bytes", state="untouched"):
            for strategy in STRATEGIES:
                answer = server.complete(prompt=[5, 6, 7], max_tokens=8, ignore_eos=True, kv_cache=strategy)
                tokens += answer.json()["usage"]["completion_tokens"]
        size = server.wait_for_memory()
        assert 255 * MIB < size <= 256 * MIB
        now = server.metrics()
        pool = [metric(now, "kvmux_kv_cache_pool_bytes", state=state) for state in ("held", "free", "untouched")]
        assert (sum(pool), pool[-1]) == (size, 0)
        assert server.engine.memory_info().rss > size
        assert tokens % 8 == 0


def test_all_of_the_memory_is_there_before_a_server_that_wants_it_so_is_ready() -> None:
    flags = "--threads", "1", "--kv-memory", "256MiB", "--max-num-seqs", "2048", "--kv-memory-at-start"
    with serving(*flags, anew=True) as server:
        assert server.metric("kvmux_kv_cache_pool_bytes", state="untouched") == 0
        size = server.metric("kvmux_kv_cache_pool_bytes", state="free")
        assert 255 * MIB < size <= 256 * MIB
        assert server.engine.memory_info().rss > size
