"""Tool calls by depth: a fact from 10, 50 or 90 % of a long conversation is an argument of the call that is due.

A right answer is one call with the right name and exactly the right arguments. Models that have no template for tools
get them as text, and answer with a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

from server.evaluation.suites.ruler import draw_number
from server.evaluation.suites.task import Message, SuiteTask, TaskSample, Turn
from server.evaluation.suites.words import draw_words

DEPTHS = (10, 50, 90)  # percent of the conversation before the fact
NAMES = ("Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Keiko", "Luis")
JSON_LEAD = '{"name": "'  # begins a call of a model without a template for tools


class Errand(NamedTuple):
    """A tool with one argument, the thing whose number that is, and how the user asks for the call."""

    tool: str
    argument: str
    thing: str
    request: str

    def state(self, name: str, number: str) -> str:
        """Return the sentence that states the argument's value."""
        return f"{self.thing.capitalize().format(name)} has the {self.argument.replace('_', ' ')} {number}."

    def ask(self, name: str) -> str:
        """Return the sentence that asks for the call."""
        return self.request.format(self.thing.format(name))


ERRANDS = (
    Errand("track_parcel", "parcel_number", "the parcel for {}", "Where is {}?"),
    Errand("pay_invoice", "invoice_number", "the invoice from {}", "Pay {}."),
    Errand("cancel_booking", "booking_code", "the booking of {}", "Cancel {}."),
    Errand("open_ticket", "ticket_id", "the support ticket of {}", "Show me {}."),
)
TOOLS: Sequence[Mapping[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": each.tool,
            "description": f"{each.tool.replace('_', ' ').capitalize()}.",
            "parameters": {
                "type": "object",
                "properties": {each.argument: {"type": "string"}},
                "required": [each.argument],
                "additionalProperties": False,
            },
        },
    }
    for each in ERRANDS
]


def draw_conversation(rng: Random, size: int, length: int, *, depth: int) -> TaskSample:
    """Return a conversation of `size` exchanges with a fact at a depth, and the request for the call that needs it."""
    known = [(each, name) for each in ERRANDS for name in NAMES]
    (errand, name), example, *others = rng.sample(known, len(known))
    value = draw_number(rng)
    exchanges = [_chat(rng) if i % 4 else _state(*rng.choice(others), draw_number(rng)) for i in range(size)]
    exchanges.insert(round(size * depth / 100), _state(errand, name, value))
    earlier = [*_call(*example, draw_number(rng)), *(message for exchange in exchanges for message in exchange)]
    right = json.dumps({"name": errand.tool, "arguments": {errand.argument: value}})
    return TaskSample("", [Turn(errand.ask(name), [right])], 64, earlier, TOOLS)


def _state(errand: Errand, name: str, value: str) -> list[Message]:
    """Return an exchange in which the user states a value."""
    return [
        {"role": "user", "content": f"{errand.state(name, value)} Keep it in mind for later."},
        {"role": "assistant", "content": "I have noted it."},
    ]


def _chat(rng: Random) -> list[Message]:
    """Return an exchange about nothing that is needed."""
    place, thing, *others = draw_words(rng, 8)
    return [
        {"role": "user", "content": f"Here is a list for the {place}: {', '.join(others)}. What is it good for?"},
        {"role": "assistant", "content": f"It is a list for the {place}, perhaps for the {thing}."},
    ]


def _call(errand: Errand, name: str, value: str) -> list[Message]:
    """Return an exchange in which the user states a value and asks for a call, which is made."""
    function = {"name": errand.tool, "arguments": {errand.argument: value}}
    call = {"id": "call00001", "type": "function", "function": function}
    return [
        {"role": "user", "content": f"{errand.state(name, value)} {errand.ask(name)}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "name": errand.tool, "content": '{"status": "done"}'},
        {"role": "assistant", "content": "It is done."},
    ]


def describe_tools(sample: TaskSample) -> TaskSample:
    """Return the sample for a model without a template for tools: they and their calls are JSON in the texts."""
    listed = "\n".join(json.dumps(tool["function"]) for tool in sample.tools)
    intro = f'Answer with {{"name": ..., "arguments": ...}} if one of these functions should be called:\n{listed}\n\n'
    first, *others = [_write_calls(each) for each in sample.earlier]
    earlier = [{**first, "content": intro + first["content"]}, *others]
    turns = [Turn(turn.question, turn.answers, JSON_LEAD) for turn in sample.turns]
    return TaskSample(sample.context, turns, sample.max_tokens, earlier)


def _write_calls(message: Message) -> dict[str, Any]:
    """Return a message whose role and content are those of a conversation without tools."""
    calls = "".join(json.dumps(call["function"]) for call in message.get("tool_calls", ()))
    return {"role": "user" if message["role"] == "tool" else message["role"], "content": message["content"] + calls}


def score_call(answer: str, right: Sequence[str]) -> float:
    """Return 1 if the first JSON object of the answer, or of JSON_LEAD with it, is the right call; otherwise 0."""
    text = answer if "{" in answer.partition('"')[0] else JSON_LEAD + answer
    try:
        call, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    except ValueError:
        return 0.0
    return float(call == json.loads(right[0]))


TOOL_CALLS = tuple(
    SuiteTask(f"tool_calls_{depth}", partial(draw_conversation, depth=depth), score_call, least=2) for depth in DEPTHS
)
