"""The form in which a chat template takes an assistant's message with tool calls, found by rendering one.

Most templates take arguments as an object, some as the JSON text that OpenAI's API has. Where the message has no text,
most templates look whether there is a content, some whether it is null, and some want an empty text. Some leave out
calls beside a text, and get two messages. Some have no place for calls, and get them as text. A template given the
wrong form fails, leaves the calls out, or writes them as Python does. Knows neither requests nor any template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

NAME, KEY, VALUE, TEXT, ANSWER = "probetool", "probekey", "probevalue", "probetext", "probeanswer"
ABSENT = object()  # stands for a message without the key
CONTENTS = (ABSENT, None, "")


Write = Callable[[list[Any]], str]


class CallStyle(NamedTuple):
    """The form of an assistant's message with tool calls."""

    arguments_as_text: bool = False
    content: object = ABSENT  # the content of a message that has no text
    write: Write | None = None  # writes the calls into the content
    splits: bool = False  # whether a message with text and calls becomes two

    def apply(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a message with tool calls, whose arguments are objects, in this form: as one message or two."""
        if self.splits and message.get("content"):
            text = {key: value for key, value in message.items() if key != "tool_calls"}
            return [text, self._apply({"role": message["role"], "tool_calls": message["tool_calls"]})]
        return [self._apply(message)]

    def _apply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        changed = dict(message)
        if self.write is not None:
            calls = [call["function"] for call in changed.pop("tool_calls")]
            return changed | {"content": (changed.get("content") or "") + self.write(calls)}
        if self.content is not ABSENT and not changed.get("content"):
            changed["content"] = self.content
        if self.arguments_as_text:
            changed["tool_calls"] = [_write_arguments(call) for call in message["tool_calls"]]
        return changed


def _write_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def find_call_style(render: Callable[..., str], write: Write | None) -> CallStyle:
    """Return the first form that a template writes as a call; the usual one if it writes none.

    `write` writes calls as the model's family does, for templates that leave them out.
    """
    styles = [CallStyle(as_text, content) for as_text in (False, True) for content in CONTENTS]
    styles += [] if write is None else [CallStyle(write=write)]
    style = next((style for style in styles if writes_calls(render, style)), CallStyle())
    if writes_calls(render, style, TEXT):
        return style
    splitting = style._replace(splits=True)
    return splitting if writes_calls(render, splitting, TEXT) else style


def writes_calls(render: Callable[..., str], style: CallStyle, text: str = "") -> bool:
    """Return whether a template writes a tool call that is given in this form, beside `text` if there is one."""
    return _is_written(_render_probe(render, style, text))


def _render_probe(render: Callable[..., str], style: CallStyle, text: str = "") -> str:
    function = {"name": NAME, "arguments": {KEY: VALUE}}
    call = {"id": "abcdef123", "type": "function", "function": function}
    # Of other names than the call, as some templates write tools as Python does
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": []}
    tool = {"type": "function", "function": {"name": NAME, "description": "a", "parameters": parameters}}
    messages = [
        {"role": "user", "content": "question"},
        *style.apply({"role": "assistant", "tool_calls": [call]} | ({"content": text} if text else {})),
        {"role": "tool", "tool_call_id": "abcdef123", "name": NAME, "content": ANSWER},
    ]
    # Without other variables: what a template compares with an undefined one takes its usual way
    variables = {"messages": messages, "tools": [tool], "bos_token": "", "eos_token": "", "add_generation_prompt": True}
    try:
        return render(**variables)
    except MemoryError:
        raise
    except Exception:  # a template is a program and may raise any exception
        return ""


def _is_written(prompt: str) -> bool:
    """Return whether a prompt has the call, in the form of JSON or in tags, and no None."""
    is_python, is_quoted_twice = f"'{KEY}'" in prompt, f'\\"{KEY}\\"' in prompt
    return VALUE in prompt and not (is_python or is_quoted_twice or "None" in prompt)
