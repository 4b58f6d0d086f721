"""Makes a response of generated text in the form of the Responses API: output items, whole or in events.

The items have the order in which the model writes them. Events are numbered; so, unlike those of other endpoints, the
functions that make them belong to one response.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from server.api.openai.chat import ChatRequest
from server.api.openai.generation import Generation, OutputDelta
from server.api.openai.response_items.fields import rename_field
from server.api.openai.response_items.input import ResponseRequest
from server.api.openai.response_models import Usage
from server.api.openai.responses import ENCODER, Format, make_response_fields
from server.text.tool_parsers.calls import ToolCall
from server.text.tool_parsers.message_parser import MessagePart, MessageText

Json = dict[str, Any]


def make_format(body: ResponseRequest) -> Format[ChatRequest]:
    """Return how the response to this body is written."""
    writer = _ResponseWriter(body)
    return Format(writer.make_events, writer.make_whole, _encode_event, has_state=True, rename_field=rename_field)


def _encode_event(event: Json) -> bytes:
    """Return an event as JSON, and a line with its name, which may follow its data."""
    data: bytes = ENCODER.encode(event)
    return data + b"\nevent: " + str(event["type"]).encode()


class _OpenText:
    """The reasoning or the message that a stream is adding text to."""

    def __init__(self, kind: str, output_index: int) -> None:
        self.kind = kind
        self.output_index = output_index
        self.text = ""
        self.id = _make_id("rs" if kind == "reasoning" else "msg")
        self._part_type = "reasoning_text" if kind == "reasoning" else "output_text"
        self._extra_fields: Json = {} if kind == "reasoning" else {"logprobs": []}  # of its events

    def open(self) -> list[Json]:
        """Return the events that begin the item."""
        item = self._make_item("in_progress", [])
        added = {"type": "response.output_item.added", "output_index": self.output_index, "item": item}
        return [added, self._make_event("content_part.added", part=self._make_part())]

    def extend(self, text: str) -> list[Json]:
        """Add text; return the events of doing so."""
        self.text += text
        return [self._make_event(f"{self._part_type}.delta", delta=text, **self._extra_fields)]

    def close(self, status: str) -> tuple[Json, list[Json]]:
        """Return the item as it is at its end, and the events that end it."""
        part = self._make_part()
        events = [
            self._make_event(f"{self._part_type}.done", text=self.text, **self._extra_fields),
            self._make_event("content_part.done", part=part),
        ]
        return self._make_item(status, [part]), events

    def _make_event(self, name: str, **fields: Any) -> Json:
        where = {"item_id": self.id, "output_index": self.output_index, "content_index": 0}
        return {"type": f"response.{name}", **where, **fields}

    def _make_part(self) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def _make_item(self, status: str, content: list[Json]) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": self.id, "role": "assistant", "content": content, "status": status}


class _OpenCall:
    """The call that a stream is adding arguments to."""

    kind = "function_call"

    def __init__(self, call: ToolCall, output_index: int) -> None:
        self.output_index = output_index
        self.text = ""
        self._item = {"type": self.kind, "id": _make_id("fc"), "call_id": call.id, "name": call.name}
        self._where = {"item_id": self._item["id"], "output_index": output_index}

    def open(self) -> list[Json]:
        """Return the events that begin the item."""
        item = self._item | {"arguments": "", "status": "in_progress"}
        return [{"type": "response.output_item.added", "output_index": self.output_index, "item": item}]

    def extend(self, text: str) -> list[Json]:
        """Add to the arguments; return the events of doing so."""
        self.text += text
        return [{"type": "response.function_call_arguments.delta", **self._where, "delta": text}] if text else []

    def close(self, status: str) -> tuple[Json, list[Json]]:
        """Return the item as it is at its end, and the events that end it."""
        done = {"name": self._item["name"], "arguments": self.text}
        event = {"type": "response.function_call_arguments.done", **self._where, **done}
        return self._item | {"arguments": self.text, "status": status}, [event]


class _ResponseWriter:
    """Writes one response."""

    def __init__(self, body: ResponseRequest) -> None:
        self._body = body
        self._sequence_number = 0  # of the next event
        self._items: list[Json] = []  # those that are complete
        self._open: _OpenText | _OpenCall | None = None  # the item that is not complete yet

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
            event["sequence_number"] = self._sequence_number
            self._sequence_number += 1
        return events

    # ------------------------------------------------------------ items
    def _add_parts(self, delta: OutputDelta) -> list[Json]:
        """Add the parts of a delta to the response's items; return the events of doing so."""
        parts = delta.parts or ([MessageText("content", delta.text)] if delta.text else [])
        return [event for part in parts for event in self._add_part(part)]

    def _add_part(self, part: MessagePart) -> list[Json]:
        if isinstance(part, MessageText):
            return self._add_text("message" if part.channel == "content" else part.channel, part.text)
        if part.id:
            return [*self._close("completed"), *self._begin(_OpenCall(part, len(self._items)), part.arguments)]
        assert isinstance(self._open, _OpenCall), "a part of a call follows its first part"
        return self._open.extend(part.arguments)

    def _add_text(self, kind: str, text: str) -> list[Json]:
        if self._open is not None and self._open.kind == kind:
            return self._open.extend(text)
        events = self._close("completed")
        return events + self._begin(_OpenText(kind, len(self._items)), text)

    def _begin(self, item: _OpenText | _OpenCall, text: str) -> list[Json]:
        """Open an item with its first text or arguments; return the events of doing so."""
        self._open = item
        return [*item.open(), *item.extend(text)]

    def _close(self, status: str) -> list[Json]:
        """Complete the item that is open, if any; return the events of doing so."""
        if self._open is None:
            return []
        item, events = self._open.close(status)
        done = {"type": "response.output_item.done", "output_index": self._open.output_index, "item": item}
        self._items.append(item)
        self._open = None
        return [*events, done]

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
            "tool_choice": body.tool_choice or "auto",
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

    @staticmethod
    def _make_usage(usage: Usage) -> Json:
        cached, details = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},  # writing costs nothing here
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": details.reasoning_tokens if details else 0},
            "total_tokens": usage.total_tokens,
        }


def _find_status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _make_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
