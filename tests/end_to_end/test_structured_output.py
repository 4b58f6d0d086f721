"""Structured output of a whole server, as the openai client asks for it."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.end_to_end.server_process import Server

PROMPT = "Once upon a time there was a"
MESSAGES: Any = [{"role": "user", "content": "Who was there?"}]


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=9)


class Story(BaseModel):
    hero: str = Field(max_length=8)
    pets: list[Pet] = Field(max_length=2)
    ends_well: bool | None


def test_a_pydantic_model_is_parsed(client: openai.OpenAI, rng: random.Random) -> None:
    for _ in range(5):
        answer = client.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Story, max_tokens=600, seed=rng.randrange(2**31)
        )
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Story)


def test_a_streamed_pydantic_model_is_parsed(client: openai.OpenAI, rng: random.Random) -> None:
    seed = rng.randrange(2**31)
    wanted: Any = {"model": "tiny", "messages": MESSAGES, "response_format": Story, "max_tokens": 600, "seed": seed}
    with client.chat.completions.stream(**wanted) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == client.chat.completions.parse(**wanted).choices[0].message.parsed


def test_choices_drafts_and_strategies(client: openai.OpenAI) -> None:
    for strategy in ("paged", "contiguous", "sliding_window"):
        answer = client.completions.create(
            model=f"tiny:{strategy}",
            prompt=PROMPT,
            n=4,
            max_tokens=120,
            seed=1,
            extra_body={
                "structured_outputs": {"regex": r"([a-z]{3}, ){8}[a-z]{3}\."},
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 8},
            },
        )
        texts = [choice.text for choice in answer.choices]
        assert all(re.fullmatch(r"([a-z]{3}, ){8}[a-z]{3}\.", text) for text in texts), texts
        assert len(set(texts)) == 4


def test_best_of(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, best_of=4, n=2, extra_body={"guided_choice": ["red", "green", "blue", "yellow"]}
    )
    assert {choice.text for choice in answer.choices} <= {"red", "green", "blue", "yellow"}


def test_an_unconstrained_request_gets_the_same_text_beside_constrained_ones(client: openai.OpenAI) -> None:
    wanted: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200, "temperature": 0}
    alone = client.completions.create(**wanted).choices[0].text

    def constrained(seed: int) -> str:
        body = {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 30}}}
        answer = client.completions.create(model="tiny", prompt="x", max_tokens=200, seed=seed, extra_body=body)
        return answer.choices[0].text

    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(constrained, seed) for seed in range(6)]
        beside = pool.submit(lambda: client.completions.create(**wanted).choices[0].text)
        assert beside.result() == alone
        assert all(other.result().startswith("[") for other in others)


def test_an_unsupported_keyword_is_named(client: openai.OpenAI, tiny: Server) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "set", "schema": schema}},
        )
    assert json.loads(
        client.completions.create(
            model="tiny", prompt="1", max_tokens=50, extra_body={"guided_json": {"enum": [{"a": 1}]}}
        )
        .choices[0]
        .text
    ) == {"a": 1}
