"""Tools and chats with them, through openai-python: what the tests of this folder share."""

from __future__ import annotations

import json
from typing import Any

from tests.api.openai.tools.conftest import ToolServer

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "get_time", "description": "Return the time."}}
FUNCTION = TOOL["function"]
MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Z\u00fcrich?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Z\u00fcrich \u2603"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
WRONG = CALL.replace("city", "town")  # by no tool's schema
SCHEMA = {"type": "object", "properties": {"sky": {"enum": ["clear", "grey"]}}, "required": ["sky"]}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
THOUGHT = "<think>\nHm, {} or a call?\n</think>\n\n"


def ask(server: ToolServer, **body: Any) -> Any:
    """Return the response to a chat with both tools."""
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL, OTHER]}
    return server.client.chat.completions.create(**asked | body)


def stream(server: ToolServer, **body: Any) -> Any:
    """Return the message that openai's helper makes of a stream, and its finish reason."""
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL, OTHER]}
    with server.client.chat.completions.stream(**asked | body) as events:
        for _ in events:
            pass
        (choice,) = events.get_final_completion().choices
        return choice


def calls_of(message: Any) -> list[tuple[str, Any]]:
    """Return the names and arguments of a message's calls."""
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def allowed(mode: str, *names: str) -> Any:
    """Return the tool_choice that allows the tools of these names."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
