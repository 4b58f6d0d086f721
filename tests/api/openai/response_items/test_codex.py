"""POST /v1/responses as Codex uses it: with tools and items of types that chats do not have."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, Required, Union, get_args, get_origin

import pytest
from openai.types.responses import ResponseInputItemParam, ToolParam
from typing_extensions import get_type_hints, is_typeddict

from tests.api.openai.tools.conftest import ToolServer, serving_tools
from tests.api.payloads import error_of

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Return the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


@pytest.fixture(scope="module")
def qwen() -> Iterator[ToolServer]:
    with serving_tools("qwen3") as server:
        yield server


OTHER_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    {"type": "namespace", "name": "mcp", "tools": []},
    {"type": "image_generation"},
    {"type": "local_shell"},
    {"type": "programmatic_tool_calling"},
]


@pytest.mark.parametrize("tool", OTHER_TOOLS, ids=lambda tool: str(tool["type"]))
def test_tools_that_a_model_cannot_call_are_skipped(qwen: ToolServer, tool: dict[str, Any]) -> None:
    qwen.says("Hello.")
    body = {"model": "tiny", "input": "Hi", "tools": [tool, TOOL], "client_metadata": {"x": "1"}}
    answer = qwen.http.post("/v1/responses", json=body)
    assert answer.is_success, answer.text
    assert f"tools.{tool['type']}" in answer.headers["x-ignored-fields"]
    assert [each["name"] for each in answer.json()["tools"]] == ["get_weather"]
    assert "get_weather" in qwen.prompt


def test_items_of_other_tools_are_shown_or_dropped(qwen: ToolServer) -> None:
    qwen.says("Hello.")
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "patched"},
        {"type": "local_shell_call", "id": "l", "call_id": "b", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "l", "output": "a.txt"},
        {"type": "shell_call", "call_id": "c", "action": {"commands": ["rm a.txt"]}},
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "", "stderr": "denied"}]},
        {"type": "apply_patch_call", "call_id": "d", "operation": {"type": "delete_file", "path": "b.txt"}},
        {"type": "apply_patch_call_output", "call_id": "d", "status": "failed"},
        {"type": "tool_search_call", "arguments": {}},
        {"type": "tool_search_output", "tools": [TOOL | {"name": "found"}]},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"role": "user", "content": "Go on"},
    ]
    answer = qwen.http.post("/v1/responses", json={"model": "tiny", "input": items, "tools": [TOOL]})
    assert answer.is_success, answer.text
    left_out = "input.tool_search_call, input.tool_search_output, input.web_search_call"
    assert answer.headers["x-ignored-fields"] == left_out
    prompt = qwen.prompt
    shown = ["*** Begin", "patched", '"command": ["ls"]', "a.txt", "rm a.txt", "denied", "b.txt", "failed", "Go on"]
    for text in shown:
        assert text in prompt
    assert "found" not in prompt


def test_an_output_names_the_call_that_it_answers(qwen: ToolServer) -> None:
    call = {"type": "local_shell_call", "id": "l", "call_id": "b", "action": {"type": "exec", "command": ["ls"]}}
    for output, param in (({"id": "x"}, "id"), ({"id": "l", "call_id": "x"}, "call_id"), ({}, "call_id")):
        items = [call, {"type": "local_shell_call_output", "output": "a.txt"} | output]
        response = qwen.http.post("/v1/responses", json={"input": items})
        assert error_of(response)["param"] == f"input[1].{param}", output


def test_members_of_functions_without_effect(qwen: ToolServer) -> None:
    qwen.says("Hello.")
    members = {"allowed_callers": ["direct"], "defer_loading": True, "output_schema": {"type": "string"}, "async": True}
    answer = qwen.http.post("/v1/responses", json={"input": "Hi", "tools": [TOOL | members]})
    assert answer.headers["x-ignored-fields"].split(", ") == [f"tools.{name}" for name in members]
    assert answer.json()["tools"] == [TOOL]
    assert not any(name in qwen.prompt for name in members)


# ---------------------------------------------------------------- drawn requests
def get_kinds(declared: Any) -> dict[str, list[Any]]:
    """Return the types of which the openai package declares a value to be one, by what their member `type` can be."""
    kinds: dict[str, list[Any]] = {}
    for each in get_args(declared):
        first, *rest = get_args(get_type_hints(each)["type"])
        for name in [first, *rest] if isinstance(first, str) else get_args(first):  # not text: it may be absent or null
            kinds.setdefault(name, []).append(each)
    return kinds


ITEMS, TOOLS = get_kinds(ResponseInputItemParam), get_kinds(ToolParam)
CALLS = ["function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call"]
SHOWN = ["message", "reasoning", *CALLS, *(f"{call}_output" for call in CALLS)]
REFUSED = [  # they stand for what only OpenAI's servers have
    *("item_reference", "compaction", "compaction_trigger", "configuration_update", "additional_tools"),
    *("program", "program_output"),
]
DROPPED = sorted({*ITEMS} - {*SHOWN, *REFUSED})
WORD = re.compile(r"w\d+w")


@pytest.mark.parametrize("kind", REFUSED)
def test_items_of_which_the_server_has_nothing_are_refused(qwen: ToolServer, kind: str, rng: random.Random) -> None:
    item = Drawing(rng).draw(ITEMS[kind][0]) | {"type": kind}
    error = error_of(qwen.http.post("/v1/responses", json={"input": [item]}))
    assert error["param"] == "input[0].type"
    assert f'items of the type "{kind}" are not supported' in error["message"]


class Drawing:
    """Draws what the openai package declares, with any of the members that may be absent; texts are words of WORD."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._numbers = itertools.count()

    def word(self) -> str:
        """Return a word that is nowhere else."""
        return f"w{next(self._numbers)}w"

    def draw(self, kind: Any) -> Any:
        """Return a value of a type."""
        if is_typeddict(kind):
            hints = get_type_hints(kind, include_extras=True)
            drawn = [key for key, hint in hints.items() if get_origin(hint) is Required or self.rng.random() < 0.3]
            return {key: self.draw(hints[key]) for key in drawn}
        origin, of = get_origin(kind), get_args(kind)
        if origin is Literal:
            return self.rng.choice(of)
        if origin in (Required, Union):
            return self.draw(self.rng.choice([each for each in of if not is_media(each)]))
        if origin is dict:
            return {self.word(): self.draw(of[1])}
        if origin is not None:
            return [self.draw(of[0]) for _ in range(self.rng.randint(1, 2))]
        return {bool: True, int: 5, float: 0.5, NoneType: None}[kind] if kind not in (str, object) else self.word()

    def draw_history(self) -> list[dict[str, Any]]:
        """Return items, each of whose calls is answered before the assistant's next text, and a message after them."""
        items: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        for _ in range(self.rng.randrange(8)):
            name = self.rng.choice(["message", "reasoning", self.rng.choice(CALLS), self.rng.choice(DROPPED)])
            item = self.draw(self.rng.choice(ITEMS[name]))
            if item.get("role") == "assistant":
                items += map(self.draw_output, calls)
                calls = []
            items.append(item)
            if name == "function_call":
                items[-1]["arguments"] = json.dumps({self.word(): self.word()})
            calls += items[-1:] if name in CALLS else []
            while calls and self.rng.random() < 0.6:
                items.append(self.draw_output(calls.pop(self.rng.randrange(len(calls)))))
        return [*items, *map(self.draw_output, calls), {"role": "user", "content": self.word()}]

    def draw_output(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the output of a call, of its own type or of a function's."""
        name = self.rng.choice([f"{call['type']}_output", "function_call_output"])
        output: dict[str, Any] = self.draw(ITEMS[name][0])
        if name == "local_shell_call_output" and self.rng.random() < 0.5:  # as it is declared
            return output | {"id": self.rng.choice([call["id"], call["call_id"]])}
        return output | {"call_id": call["call_id"]}

    def draw_tool(self) -> dict[str, Any]:
        name = self.rng.choice(["function", self.rng.choice(sorted(TOOLS))])
        tool: dict[str, Any] = self.draw(TOOLS[name][0]) | {"type": name}
        if name == "function" and tool["parameters"] is not None:
            tool["parameters"] = {"type": "object", "properties": {self.word(): {"type": "string"}}}
        return tool

    def draw_request(self) -> dict[str, Any]:
        """Return a request with the fields that Codex sends."""
        return {
            "model": "tiny",
            "instructions": self.rng.choice([self.word(), None]),
            "input": self.draw_history(),
            "tools": [self.draw_tool() for _ in range(self.rng.randrange(6))],
            "tool_choice": "auto",
            "parallel_tool_calls": self.rng.random() < 0.5,
            "reasoning": self.rng.choice([None, {"effort": "medium", "summary": "auto"}]),
            "store": False,
            "stream": self.rng.random() < 0.5,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": self.word(),
        } | self.rng.choice([{}, {"client_metadata": {self.word(): self.word()}, "text": {"verbosity": "low"}}])


def is_media(kind: Any) -> bool:
    """Return whether a type is that of a part of a content that is no text."""
    return is_typeddict(kind) and kind.__name__.startswith("ResponseInput") and "Text" not in kind.__name__


def find_texts(item: dict[str, Any]) -> list[str]:
    """Return the texts of an item that a model has to see, in their order."""
    match item:
        case {"role": _, "content": str(text)} | {"output": str(text)}:
            return [text]
        case {"role": _, "content": list(parts)}:
            return [part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts]
        case {"type": "function_call"}:
            return [item["name"], *json.loads(item["arguments"]).values()]
        case {"type": "custom_tool_call"}:
            return [item["name"], item["input"]]
        case {"action": {"command": list(words)} | {"commands": list(words)}}:
            return words
        case {"operation": operation}:
            return [operation["path"]]
        case {"type": "apply_patch_call_output"}:
            return [item["status"]]
        case {"output": list(parts)}:
            return [part[key] for part in parts for key in part if key in ("text", "stdout", "stderr")]
    return []


def test_drawn_requests_reach_the_prompt(qwen: ToolServer, rng: random.Random) -> None:
    drawing = Drawing(rng)
    for _ in range(20):
        body = drawing.draw_request()
        qwen.says("Hello.")
        answer = qwen.http.post("/v1/responses", json=body)
        assert answer.is_success, (body, answer.text)
        prompt, place = qwen.prompt, 0
        dropped = [item for item in body["input"] if item.get("type") in DROPPED]
        texts = [text for item in body["input"] if item not in dropped for text in find_texts(item)]
        for text in [body["instructions"] or "", *texts]:
            assert text in prompt[place:], (text, body, prompt)
            place = prompt.index(text, place) + len(text)
        functions = [tool for tool in body["tools"] if tool["type"] == "function"]
        others = [tool for tool in body["tools"] if tool["type"] != "function"]
        written = re.findall(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
        names = [json.loads(line)["function"]["name"] for lines in written for line in lines.split("\n")]
        assert names == [tool["name"] for tool in functions], (body, prompt)
        assert not {*WORD.findall(json.dumps([others, dropped]))} & {*WORD.findall(prompt)}, (body, prompt)
        left_out = {f"tools.{tool['type']}" for tool in others} | {f"input.{item['type']}" for item in dropped}
        ignored = answer.headers["x-ignored-fields"].split(", ")
        assert left_out <= {*ignored} or ignored[-1] == "..."
