"""Structured output and tool calls on a small, busy server whose steps fail, while other clients leave.

The model has random weights, so it writes whatever the grammars allow. Each answer is what it was when nothing else was
computed, and satisfies its schema by the word of `jsonschema`. The engine checks its bookkeeping after every step.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx
import jsonschema
import pytest
from transformers import Qwen2Config

from server.processes.supervisor import Targets
from tests.end_to_end.server_process import PATIENCE, Server, eventually, metric, serving
from tests.end_to_end.tool_model import TEMPLATE
from tests.models.random_models import CONFIGS, save_random_model

INSTANCES = ("paged", "contiguous", "sliding_window")
REQUESTS = 48
LONG_TEXTS, LONG_TEXT = 4, 400  # requests, and their tokens: 768 bytes each
# So little memory that it holds three of the long texts, and admits all of them at once.
CONFIG = """
model = "{model}"
dtype = "float32"
threads = 1
deterministic = true
reasoning_parser = "off"
workers = 2
max_seq_len = 1024
max_num_seqs = 12
max_num_batched_tokens = 64
kv_memory = "1MiB"
kv_overcommit = 12
"""
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Basel"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FLAG = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
SCHEMAS: dict[str, Mapping[str, Any]] = {"get_weather": SCHEMA, "set_flag": FLAG}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in SCHEMAS.items()]
STRICT = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
KINDS: dict[str, dict[str, Any]] = {
    "content": {"response_format": FORMAT},
    "calls": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "several calls": {"tools": TOOLS, "tool_choice": "required"},
    "one tool": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "set_flag"}}},
    "calls or content": {"tools": TOOLS, "response_format": FORMAT, "parallel_tool_calls": False},
    "strict": {"tools": STRICT},
    "any text": {},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("models") / "random"
    longer = {"max_position_embeddings": 2048}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "longer", Qwen2Config(**(CONFIGS["qwen2"].to_dict() | longer)))
        save_random_model("longer", model)
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    config = model.parent / "kvmux.toml"
    config.write_text(CONFIG.format(model=model))
    with serving("--config", str(config), targets=Targets("tests.end_to_end.checked_engine:run")) as running:
        yield running


def make_body(server_model: str, rng: random.Random, number: int) -> dict[str, Any]:
    kind = rng.choice(list(KINDS))
    body: dict[str, Any] = {
        "model": server_model,
        "messages": [{"role": "user", "content": "What is it like? " * rng.randrange(1, 6)}],
        "max_tokens": rng.choice([12, 60, 150]),
        "kv_cache": rng.choice(INSTANCES),
        "seed": number,
        "temperature": rng.choice([0, 1.0, 1.5]),
        "n": rng.choice([1, 1, 3]),
        "stream": rng.random() < 0.5,
    }
    if rng.random() < 0.4:
        body["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 6}
    if rng.random() < 0.2:
        body["stop"] = ["Basel", "}"]
    return body | KINDS[kind]


def make_long_body(server_model: str, number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Go on."}]
    body = {"model": server_model, "messages": messages, "kv_cache": "paged", "seed": number, "n": 1, "stream": False}
    return body | {"max_tokens": LONG_TEXT, "ignore_eos": True}


async def iter_chunks(answer: httpx.Response) -> AsyncIterator[Any]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            yield chunk


async def ask(http: httpx.AsyncClient, body: Mapping[str, Any], leave_after: int | None = None) -> list[Any]:
    """Return what each choice has; an empty list for a client that leaves after so many chunks."""
    choices: list[dict[str, Any]] = [{"finish": None, "content": "", "calls": []} for _ in range(body["n"])]
    if not body["stream"] and leave_after is None:
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, (answer.text, body)
        for choice in answer.json()["choices"]:
            calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
            found = choices[choice["index"]]
            found["finish"], found["content"] = choice["finish_reason"], choice["message"]["content"] or ""
            found["calls"] = [[call["name"], call["arguments"]] for call in calls]
        return choices
    count = 0
    async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for chunk in iter_chunks(answer):
            if leave_after == (count := count + 1):
                return []
            for choice in chunk["choices"]:
                found, delta = choices[choice["index"]], choice["delta"]
                found["finish"] = choice["finish_reason"] or found["finish"]
                found["content"] += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    if call["index"] == len(found["calls"]):
                        found["calls"].append([call["function"]["name"], ""])
                    found["calls"][call["index"]][1] += call["function"]["arguments"]
    return choices


def assert_by_schema(body: Mapping[str, Any], choices: list[Any]) -> int:
    """Assert that what is complete satisfies its schema; return the number of contents and calls."""
    count = 0
    for choice in choices:
        is_cut = choice["finish"] == "length" or "stop" in body
        complete = choice["calls"][:-1] if is_cut else choice["calls"]
        if body.get("tool_choice") or any(tool["function"].get("strict") for tool in body.get("tools", ())):
            for name, arguments in complete:
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
                count += 1
        if body.get("tool_choice") and not is_cut:
            assert complete, (body, choice)
            assert not choice["content"].strip(), choice
        if "response_format" in body and not is_cut and not choice["calls"]:
            jsonschema.validate(json.loads(choice["content"]), SCHEMA)
            count += 1
    return count


@pytest.mark.fuzz
def test_answers_on_a_busy_server_are_those_of_a_quiet_one(server: Server, rng: random.Random) -> None:
    # The long texts come first while the server is busy, so they grow side by side until one of them is preempted.
    bodies = [make_long_body(server.model, number) for number in range(LONG_TEXTS)]
    bodies += [make_body(server.model, rng, number) for number in range(REQUESTS)]
    order = [*range(LONG_TEXTS), *rng.sample(range(LONG_TEXTS, len(bodies)), REQUESTS)]
    leaving = [(make_body(server.model, rng, number), rng.choice([1, 2, 5, 20])) for number in range(REQUESTS // 2)]

    async def ask_all() -> tuple[list[Any], list[Any]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as http:
            quiet = [await ask(http, body) for body in bodies]
            tasks = {number: asyncio.create_task(ask(http, bodies[number])) for number in order}
            others = [asyncio.create_task(ask(http, body, after)) for body, after in leaving]
            busy = [await tasks[number] for number in range(len(bodies))]
            await asyncio.gather(*others)
            return quiet, busy

    engine = server.engine.pid
    quiet, busy = asyncio.run(ask_all())
    count = 0
    for body, before, now in zip(bodies, quiet, busy, strict=True):
        assert now == before, body
        count += assert_by_schema(body, now)
    assert count > 0, "no answer was complete"
    eventually(lambda: all(metric(server.metrics(), f"kvmux_num_requests_{at}") == 0 for at in ("running", "waiting")))
    for usage in server.usages().values():
        assert (usage["seats"], usage["tokens"], usage["used"]) == (0, 0, 0)
    text = server.metrics()
    assert metric(text, "kvmux_num_preemptions_total") > 0
    assert metric(text, "kvmux_requests_total", outcome="cancelled") > 0
    assert metric(text, "kvmux_requests_total", outcome="error") == 0
    assert server.engine.pid == engine
