"""The chats of the benchmark of replicas, on one server: its figures are those that the server has counted."""

from __future__ import annotations

import asyncio
import random
import sys

import httpx

from tests.end_to_end.server_process import PATIENCE, eventually, metric
from tools.bench.chats import ChatLoad, read_answers
from tools.bench.replicas import clear, serve


def test_tokens_of_a_round_are_those_that_the_server_has_counted(rng: random.Random) -> None:
    load = ChatLoad(
        tenants=2, chats=3, chat_turns=3, output_tokens=4, pause=0.05, beginning_words=40, seed=rng.getrandbits(32)
    )
    with serve(sys.executable, "serve", "--kv-memory", "64MiB") as url:
        clear(url)
        answers = asyncio.run(load.run(url, lambda: ""))
        assert {each.turn for each in answers} == {(chat, turn) for chat in range(3) for turn in range(3)}
        assert all(each.cached_tokens > 0 for each in answers if each.turn[1] > 0), "chats go on in the cache"
        total, computed, *times = [each.value for each in read_answers(answers)]
        assert len(times) == len(answers) == 9

        def are_counted() -> bool:
            text = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
            prompt, cached = metric(text, "kvmux_prompt_tokens_total"), metric(text, "kvmux_prompt_tokens_cached_total")
            return (prompt, prompt - cached) == (total, computed)

        eventually(are_counted)
