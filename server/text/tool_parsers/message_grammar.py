"""The grammar of a whole message: reasoning, if the model reasons, and after it tool calls or content.

Where `response_format` or another field constrains the content, that has a grammar of its own, which the message's
grammar refers to as `@content`. Knows neither requests nor constraints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from server.grammar.rules import GrammarRules, quote_string
from server.text.tool_parsers.call_rules import CallRules
from server.text.tool_parsers.calls import Schemas
from server.text.tool_parsers.reasoning import HARMONY_MARKERS, ReasoningFormat
from server.text.tool_parsers.tool_format import ToolFormat

# What comes after the reasoning. "content" has a grammar of its own; "text with calls" is any text, in which each call
# is held to its tool's schema once it has begun.
MessageKind: TypeAlias = Literal["calls", "content", "calls or content", "text with calls"]
ReasoningState: TypeAlias = Literal["open", "possible", "over"]
CONTENT = "@content"
# White space after reasoning. It has a longest form, so that a model cannot go on with it until it has no tokens left.
SPACE = r"/\s{0,4}/"


class MessageOutline(NamedTuple):
    """What a message may be."""

    kind: MessageKind
    schemas: Schemas  # of the parameters of the tools that may be called
    parallel: bool  # whether there may be several calls
    reasoning: ReasoningState  # whether the prompt has begun the reasoning, the message may, or neither


def make_message_grammar(
    message: MessageOutline,
    tools: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    find_token: Callable[[str], int | None],
) -> str | None:
    """Return the grammar, in llguidance's Lark, of a message in a family's formats; None if the family has none.

    That is so for a text with calls if the family's calls begin as any text may, or if it has tokens around its texts.
    `find_token` returns the id of a special token.
    """
    if any(row is not None and row.harmony for row in (tools, reasoning)):
        return _make_harmony_grammar(GrammarRules(HARMONY_MARKERS, find_token), message, tools)
    markers = [marker for row in (tools, reasoning) if row is not None for marker in row.markers]
    rules = GrammarRules(markers, find_token)
    answer = _add_answer(rules, message, tools)
    return None if answer is None else rules.write(f"{_add_reasoning(rules, message, reasoning)} ({answer})".strip())


def _add_answer(rules: GrammarRules, message: MessageOutline, tools: ToolFormat | None) -> str | None:
    """Add the rules of what comes after the reasoning; return how a message goes on with them, or None."""
    if message.kind == "content":
        return CONTENT
    assert tools is not None, "only with tools there are calls"
    calls = CallRules(rules, tools.form, message.schemas, parallel=message.parallel)
    if message.kind == "text with calls":
        marker = tools.form.find_marker(tools.begins)
        if tools.around or (tools.form.between and not marker):
            return None
        return calls.add_text_with_calls(marker)
    return calls.add_calls() if message.kind == "calls" else f"{calls.add_calls()} | {CONTENT}"


def _add_reasoning(rules: GrammarRules, message: MessageOutline, reasoning: ReasoningFormat | None) -> str:
    """Add the rules of the reasoning; return how a message begins with them."""
    if reasoning is None or message.reasoning == "over":
        return ""
    if message.kind == "text with calls" and not any(map(rules.is_special, reasoning.markers)):
        return ""  # it is a part of the text
    thought = f"{rules.add_text_until('thought', reasoning.closing)} {rules.add('SPACE_AFTER', SPACE)}"
    if message.reasoning == "open":
        return thought
    return f"(({' | '.join(map(rules.quote, reasoning.opening))}) {thought})?"


# ---------------------------------------------------------------- gpt-oss
def _make_harmony_grammar(rules: GrammarRules, message: MessageOutline, tools: ToolFormat | None) -> str:
    return rules.write(f"{_add_harmony_reasoning(rules, message)} ({_add_harmony_answer(rules, message, tools)})")


def _add_harmony_reasoning(rules: GrammarRules, message: MessageOutline) -> str:
    """Add the rule of a part of the message before its last one; return how a message begins with such parts.

    A part in the channel `commentary` is content, so it is only allowed where the content may be any text.
    """
    channels = "/analysis|commentary/" if message.kind == "text with calls" else quote_string("analysis")
    head = f"{rules.quote('<|channel|>')} {channels} {rules.quote('<|message|>')}"
    end = f"{rules.add_text_until('thought', ['<|end|>'])} {rules.quote('<|start|>assistant')}"
    return f"{rules.add('part', f'{head} {end}')}*"


def _add_harmony_answer(rules: GrammarRules, message: MessageOutline, tools: ToolFormat | None) -> str:
    """Add the rules of the last part of a message, which is one call or the content; return how it is written."""
    alternatives = []
    if message.kind != "content":
        assert tools is not None, "only with tools there are calls"
        alternatives.append(CallRules(rules, tools.form, message.schemas, parallel=False).add_calls())
    if message.kind != "calls":
        final = f"{rules.quote('<|channel|>final')} {rules.quote('<|message|>')}"
        alternatives.append(f"{final} {rules.add_text() if message.kind == 'text with calls' else CONTENT}")
    return " | ".join(alternatives)
