"""A random Qwen2 that transformers saved, served by us: what we tell over HTTP is what transformers computes.

Greedy text, and log-probabilities: of prompts as evaluations score them, and of what is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.end_to_end.server_process import Server, serving
from tests.models.random_models import save_random_model

TEXTS = ("A text of a few words, ", "and another one: it is somewhat longer than the first.", "short")
TOLERANCE = 1e-3


class Theirs:
    """What transformers computes."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = save_random_model("qwen2", directory)
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """[len(ids) - 1, V]: of what follows each token."""
        return self.model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Theirs]]:
    directory = tmp_path_factory.mktemp("model")
    theirs = Theirs(directory)
    flags = ("--dtype", "float32", "--threads", "1", "--kv-memory", "32MiB", "--max-num-batched-tokens", "16")
    with serving("--model", str(directory), *flags) as server:
        yield server, theirs


# ---------------------------------------------------------------- text
def test_greedy_text_is_the_same(both: tuple[Server, Theirs]) -> None:
    server, theirs = both
    ids = torch.tensor([theirs.tokenizer.encode(TEXTS[0])])
    whole = theirs.model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=1)
    expected = theirs.tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
    for strategy in ("contiguous", "paged", "sliding_window"):
        answer = server.complete(prompt=TEXTS[0], max_tokens=40, temperature=0, kv_cache=strategy).json()
        assert answer["choices"][0]["text"] == expected
        assert answer["usage"]["prompt_tokens"] == ids.shape[1]


# ---------------------------------------------------------------- log-probabilities
@pytest.mark.parametrize("strategy", ["contiguous", "paged"])
def test_prompts_are_scored_as_evaluations_ask(both: tuple[Server, Theirs], strategy: str) -> None:
    server, theirs = both
    prompts = [theirs.tokenizer.encode(text) for text in TEXTS]
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "kv_cache": strategy}
    told = server.complete(prompt=prompts, **asked).json()
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2]
    for ids, choice in zip(prompts, told["choices"], strict=True):
        expected = theirs.logprobs(ids)
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        assert len(logprobs["tokens"]) == len(ids) + 1
        for i, token in enumerate(ids[1:]):
            own, best = logprobs["token_logprobs"][i + 1], max(logprobs["top_logprobs"][i + 1].values())
            assert own == pytest.approx(float(expected[i, token]), abs=TOLERANCE)
            assert best == pytest.approx(float(expected[i].max()), abs=TOLERANCE)
            assert (own == best) == (int(expected[i].argmax()) == token), "greedy or not, by the very same number"


def test_output_is_scored(both: tuple[Server, Theirs]) -> None:
    server, theirs = both
    asked = {"max_tokens": 12, "temperature": 0.9, "seed": 3, "logprobs": 3, "return_token_ids": True}
    choice = server.complete(prompt=TEXTS[0], **asked, repetition_penalty=1.3).json()["choices"][0]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    expected = theirs.logprobs(ids)[-12:]
    for row, token, told in zip(expected, choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True):
        assert told == pytest.approx(float(row[token]), abs=TOLERANCE)


def test_the_best_of_several_is_the_likeliest(both: tuple[Server, Theirs]) -> None:
    server, _ = both
    asked = {"prompt": TEXTS[1], "max_tokens": 8, "temperature": 1.2, "seed": 7, "logprobs": 0}
    every = server.complete(**asked, n=4).json()["choices"]
    best = server.complete(**asked, n=1, best_of=4).json()["choices"][0]
    means = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"]) for c in every]
    assert best["text"] == every[means.index(max(means))]["text"]


def test_a_scored_prompt_and_its_cached_answer_agree(both: tuple[Server, Theirs]) -> None:
    server, _ = both
    asked = {"prompt": TEXTS[1], "max_tokens": 6, "temperature": 0}
    plain = server.complete(**asked).json()["choices"][0]["text"]
    scored = server.complete(**asked, echo=True, logprobs=1).json()
    assert scored["choices"][0]["text"] == TEXTS[1] + plain
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
