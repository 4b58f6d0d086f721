"""The grammar of a whole message: reasoning, if the model reasons, and after it tool calls, a document, or a text.

A document is what the request's `response_format` says; its own grammar is referred to as `@document`. Knows neither
requests nor documents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from server.grammar.rules import GrammarRules, quote_string
from server.text.tool_parsers.call_rules import CallRules
from server.text.tool_parsers.calls import Schemas
from server.text.tool_parsers.reasoning import HARMONY_MARKERS, ReasoningFormat
from server.text.tool_parsers.tool_format import ToolFormat

Content: TypeAlias = Literal["calls", "document", "calls or document", "text with calls"]
ReasoningState: TypeAlias = Literal["open", "possible", "over"]
DOCUMENT = "@document"
# White space after reasoning. It has a longest form, so that a model cannot go on with it until it has no tokens left.
SPACE = r"/\s{0,4}/"


class MessageOutline(NamedTuple):
    """What a message may be."""

    content: Content
    schemas: Schemas  # of the parameters of the tools that may be called
    parallel: bool  # whether there may be several calls
    reasoning: ReasoningState  # whether the prompt has begun the reasoning, the message may, or neither


def make_message_grammar(
    message: MessageOutline,
    tools: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    find_token: Callable[[str], int | None],
) -> str | None:
    """Return the grammar, in llguidance's Lark, of a message of a family.

    Returns None for a text with calls if the family's calls begin like a text, or if there are tokens around its texts.

    `find_token` returns the id of a special token.
    """
    markers = [*(tools.markers if tools is not None else ()), *(reasoning.markers if reasoning is not None else ())]
    rules = GrammarRules(markers, find_token)
    if any(row is not None and row.harmony for row in (tools, reasoning)):
        rules = GrammarRules(HARMONY_MARKERS, find_token)
        return rules.write(f"{_add_harmony_reasoning(rules, message)} ({_add_harmony_content(rules, message, tools)})")
    content = _add_content(rules, message, tools)
    return None if content is None else rules.write(f"{_add_reasoning(rules, message, reasoning)} ({content})".strip())


def _add_content(rules: GrammarRules, message: MessageOutline, tools: ToolFormat | None) -> str | None:
    if message.content == "document":
        return DOCUMENT
    assert tools is not None, "only with tools there are calls"
    calls = CallRules(rules, tools.form, message.schemas, parallel=message.parallel)
    if message.content == "text with calls":
        marker = tools.form.find_marker(tools.begins)
        if tools.around or (tools.form.between and not marker):
            return None
        return calls.add_text_with_calls(marker)
    return calls.add_calls() if message.content == "calls" else f"{calls.add_calls()} | {DOCUMENT}"


def _add_reasoning(rules: GrammarRules, message: MessageOutline, reasoning: ReasoningFormat | None) -> str:
    """Add the rules of the reasoning; return how a message begins with them."""
    if reasoning is None or message.reasoning == "over":
        return ""
    if message.content == "text with calls" and not any(map(rules.is_special, reasoning.markers)):
        return ""  # it is a part of the text
    thought = f"{rules.add_text_until('thought', reasoning.closing)} {rules.add('SPACE_AFTER', SPACE)}"
    if message.reasoning == "open":
        return thought
    return f"(({' | '.join(map(rules.quote, reasoning.opening))}) {thought})?"


def _add_harmony_reasoning(rules: GrammarRules, message: MessageOutline) -> str:
    """Add the rule of a part of gpt-oss's message before its last one; return how a message begins with such parts.

    What it comments before a call is content, and only allowed where any text is.
    """
    channels = "/analysis|commentary/" if message.content == "text with calls" else quote_string("analysis")
    head = f"{rules.quote('<|channel|>')} {channels} {rules.quote('<|message|>')}"
    end = f"{rules.add_text_until('thought', ['<|end|>'])} {rules.quote('<|start|>assistant')}"
    return f"{rules.add('part', f'{head} {end}')}*"


def _add_harmony_content(rules: GrammarRules, message: MessageOutline, tools: ToolFormat | None) -> str:
    ways = []
    if message.content != "document":
        assert tools is not None, "only with tools there are calls"
        ways.append(CallRules(rules, tools.form, message.schemas, parallel=False).add_calls())
    if message.content != "calls":
        final = f"{rules.quote('<|channel|>final')} {rules.quote('<|message|>')}"
        ways.append(f"{final} {rules.add_text() if message.content == 'text with calls' else DOCUMENT}")
    return " | ".join(ways)
