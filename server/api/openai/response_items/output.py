"""Makes a response of generated text in the form of the Responses API: output items, whole or in events.

A response has its reasoning first, then its text, then its calls. Events are numbered; so, unlike those of other
endpoints, the functions that make them belong to one response.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from server.api.openai.chat import ChatRequest
from server.api.openai.generation import Generation, OutputDelta
from server.api.openai.response_items.input import ResponseRequest
from server.api.openai.response_models import Usage
from server.api.openai.responses import ENCODER, Format, make_response_fields
from server.text.tool_parsers.calls import ToolCall

Json = dict[str, Any]


def make_format(body: ResponseRequest) -> Format[ChatRequest]:
    """Return how the response to this body is written."""
    writer = _ResponseWriter(body)
    return Format(writer.make_events, writer.make_whole, encode=_encode_event, has_state=True)


def _encode_event(event: Json) -> bytes:
    """Return an event as JSON, and a line with its name, which may follow its data."""
    data: bytes = ENCODER.encode(event)
    return data + b"\nevent: " + str(event["type"]).encode()


class _OpenItem:
    """The item that a stream is adding text to: reasoning, or a message."""

    def __init__(self, kind: str, place: int) -> None:
        self.kind = kind
        self.place = place
        self.text = ""
        self.id = _make_id("rs" if kind == "reasoning" else "msg")

    def make_part(self) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def make_item(self, status: str, content: list[Json]) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": self.id, "role": "assistant", "content": content, "status": status}


class _ResponseWriter:
    """Writes one response."""

    def __init__(self, body: ResponseRequest) -> None:
        self._body = body
        self._number = 0  # of the next event
        self._items: list[Json] = []  # those that are complete
        self._open: _OpenItem | None = None

    def make_whole(self, deltas: Sequence[OutputDelta], generation: Generation[ChatRequest]) -> Json:
        """Return the whole response."""
        (delta,) = deltas
        self._add_parts(delta)
        self._close(_find_status(delta.finish_reason))
        return self._make_response(generation, delta.finish_reason)

    def make_events(self, delta: OutputDelta | None, generation: Generation[ChatRequest]) -> list[Json]:
        """Return the events of a delta."""
        if delta is None:
            return []
        events: list[Json] = []
        if delta.is_first:
            response = self._make_response(generation, None)
            events += [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]
        events += self._add_parts(delta)
        if delta.finish_reason is not None:
            status = _find_status(delta.finish_reason)
            events += self._close(status)
            response = self._make_response(generation, delta.finish_reason)
            events.append({"type": f"response.{status}", "response": response})
        for event in events:
            event["sequence_number"] = self._number
            self._number += 1
        return events

    # ------------------------------------------------------------ items
    def _add_parts(self, delta: OutputDelta) -> list[Json]:
        """Add the parts of a delta to the response's items; return the events of doing so."""
        events: list[Json] = []
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.text)):
            if text:
                events += self._add_text(kind, text)
        for call in delta.tool_calls:
            events += self._close("completed") + self._add_call(call)
        return events

    def _add_text(self, kind: str, text: str) -> list[Json]:
        events: list[Json] = []
        if self._open is None or self._open.kind != kind:
            events += self._close("completed")
            self._open = _OpenItem(kind, len(self._items))
            item = self._open.make_item("in_progress", [])
            events.append({"type": "response.output_item.added", "output_index": self._open.place, "item": item})
            events.append(self._make_part_event("content_part.added", part=self._open.make_part()))
        self._open.text += text
        name = "reasoning_text.delta" if kind == "reasoning" else "output_text.delta"
        further: Json = {} if kind == "reasoning" else {"logprobs": []}
        return [*events, self._make_part_event(name, delta=text, **further)]

    def _make_part_event(self, name: str, **fields: Any) -> Json:
        assert self._open is not None, "a part belongs to an item"
        place = {"item_id": self._open.id, "output_index": self._open.place, "content_index": 0}
        return {"type": f"response.{name}", **place, **fields}

    def _close(self, status: str) -> list[Json]:
        """Complete the item that is open, if there is one; return the events of doing so."""
        if self._open is None:
            return []
        part = self._open.make_part()
        item = self._open.make_item(status, [part])
        name = "reasoning_text.done" if self._open.kind == "reasoning" else "output_text.done"
        further: Json = {} if self._open.kind == "reasoning" else {"logprobs": []}
        events = [
            self._make_part_event(name, text=self._open.text, **further),
            self._make_part_event("content_part.done", part=part),
            {"type": "response.output_item.done", "output_index": self._open.place, "item": item},
        ]
        self._items.append(item)
        self._open = None
        return events

    def _add_call(self, call: ToolCall) -> list[Json]:
        place, item_id = len(self._items), _make_id("fc")
        item = {"type": "function_call", "id": item_id, "call_id": call.id, "name": call.name}
        complete = item | {"arguments": call.arguments, "status": "completed"}
        self._items.append(complete)
        where = {"item_id": item_id, "output_index": place}
        begun = item | {"arguments": "", "status": "in_progress"}
        return [
            {"type": "response.output_item.added", "output_index": place, "item": begun},
            {"type": "response.function_call_arguments.delta", **where, "delta": call.arguments},
            {
                "type": "response.function_call_arguments.done",
                **where,
                "name": call.name,
                "arguments": call.arguments,
            },
            {"type": "response.output_item.done", "output_index": place, "item": complete},
        ]

    # ------------------------------------------------------------ the response
    def _make_response(self, generation: Generation[ChatRequest], finish_reason: str | None) -> Json:
        """Return the response with the items so far; without a finish reason it is in progress."""
        body, fields = self._body, make_response_fields(generation)
        status = "in_progress" if finish_reason is None else _find_status(finish_reason)
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": fields["id"],
            "object": "response",
            "created_at": fields["created"],
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "model": fields["model"],
            "output": list(self._items),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tools": [tool.model_dump() for tool in body.tools],
            "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_unset=True)},
            "truncation": "disabled",
            "metadata": {},
            "usage": None if finish_reason is None else self._make_usage(fields["usage"]),
            "kv_cache": fields["kv_cache"],
        }

    def _make_usage(self, usage: Usage) -> Json:
        """Return the usage; how many tokens were reasoning is not known if some were."""
        has_reasoning = any(item["type"] == "reasoning" for item in self._items)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        } | ({} if has_reasoning else {"output_tokens_details": {"reasoning_tokens": 0}})


def _find_status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _make_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
