"""A number among 2,250 tokens is found again under strategies that keep it, and not under those that drop it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.end_to_end.server_process import Server
from tests.real.serving import FORMATS, list_exact, serving_every_kind

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
DEPTHS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
FILLER = (
    "The harbour was quiet that morning, and the boats lay in a row.",
    "A gardener watered the roses behind the old library.",
    "Two students talked about the exam on the steps of the museum.",
)
SENTENCES = 171  # of about 13 tokens each
TOKENS = 2_250
INSTANCES = {
    **FORMATS,
    "keydiff-25": {"kind": "compressed", "scorer": "keydiff", "budget": 0.25},
    "random-25": {"kind": "compressed", "scorer": "random", "budget": 0.25},
    "window-512": {"kind": "sliding_window", "window": 512},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("needle")
    with serving_every_kind("qwen-0.5b", folder, max_seq_len=4096, instances=INSTANCES) as server:
        yield server


def test_a_number_is_found_if_its_keys_are_kept(server: Server, rng: random.Random) -> None:
    numbers = [rng.randrange(10**6, 10**7) for _ in DEPTHS]
    found = {name: count_found(server, name, numbers) for name in [*list_exact(server), "quest", *INSTANCES]}
    print("found of six:", found)
    exact = {found[name] for name in list_exact(server)}
    assert len(exact) == 1, found
    assert min(exact) >= 5, found
    for name in FORMATS:
        assert found[name] >= 5, found
    assert found["quest"] >= 5, found
    assert found["keydiff-25"] > found["random-25"], found
    assert found["window-512"] <= 2, found  # what lies within the last 512 tokens


def count_found(server: Server, strategy: str, numbers: list[int]) -> int:
    return sum(
        str(number) in ask(server, strategy, depth, number) for depth, number in zip(DEPTHS, numbers, strict=True)
    )


def ask(server: Server, strategy: str, depth: float, number: int) -> str:
    """Return the answer to the question for a number that a text has at a depth."""
    sentences = list(FILLER) * (SENTENCES // len(FILLER))
    sentences.insert(int(depth * len(sentences)), f"The secret number of the lighthouse is {number}.")
    text = " ".join(sentences)
    messages = [{"role": "user", "content": f"{text}\n\nWhat is the secret number of the lighthouse? Answer with it."}]
    body = {"model": server.model, "messages": messages, "max_tokens": 24, "temperature": 0, "kv_cache": strategy}
    answer = server.post("/v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    assert TOKENS * 0.7 < answer.json()["usage"]["prompt_tokens"] < TOKENS * 1.3, answer.json()["usage"]
    return str(answer.json()["choices"][0]["message"]["content"])
