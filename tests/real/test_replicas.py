"""A model of 1.5 billion parameters on two replicas of `kvmux ray up`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.cluster.ray_cluster import Cluster, running
from tests.patience import PATIENCE
from tests.real.model_files import find_model

pytestmark = [pytest.mark.real, pytest.mark.ray, pytest.mark.timeout(1200)]
QUESTIONS = {  # with what the answer must have
    "What is the capital of France?": "Paris",
    "What is 12 times 12?": "144",
    "Which Python function returns the length of a list?": "len",
    "Write a Python function that adds two numbers.": "return",
}


def test_chats_on_two_replicas_keep_to_the_replica_that_has_their_turns() -> None:
    flags = ("--model", str(find_model("qwen-1.5b")), "--model-name", "m", "--dtype", "bfloat16")
    with running("--replicas", "2", *flags, "--kv-memory", "512MiB", "--max-seq-len", "4096") as cluster:
        replicas = cluster.wait_for_replicas(2)
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            used = set[str](pool.map(lambda question: _chat(cluster, question), QUESTIONS))
        assert used == {*replicas}, "chats at the same time are spread over the replicas"


def _chat(cluster: Cluster, question: str) -> str:
    """Have a conversation of two turns, and return the replica that answered both.

    Each has instructions of its own, as those of other tenants: with the same ones all chats would be sent to the
    replica that has them, and some moved to the idle one later.
    """
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as client:
        system = f"You help with questions like: {question} {'Answer briefly and exactly. ' * 40}"
        messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        first = _ask(client, messages)
        assert QUESTIONS[question] in first.message.content, first
        messages.append({"role": "assistant", "content": first.message.content})
        second = _ask(client, [*messages, {"role": "user", "content": "Thank you. Explain it in one more sentence."}])
    assert second.kv_cache["cached_tokens"] > len(system) / 8, "the first turn was found"
    assert second.kv_cache["routed"]["replica"] == first.kv_cache["routed"]["replica"]
    return str(second.kv_cache["routed"]["replica"])


def _ask(client: openai.OpenAI, messages: Any) -> Any:
    options: Any = {"model": "m", "temperature": 0, "max_tokens": 80, "extra_body": {"explain": True}}
    return client.chat.completions.create(messages=messages, **options).choices[0]
