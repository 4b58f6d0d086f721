"""Grammars of messages: llguidance accepts what each family writes, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import llguidance
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from server.grammar.constraint import JSON_OBJECT, constrain_content, constrain_to_schema
from server.grammar.lark import write_lark
from server.text.tool_parsers.formats import TOOL_FORMATS, list_tool_formats
from server.text.tool_parsers.message_grammar import MessageKind, MessageOutline, ReasoningState, make_message_grammar
from server.text.tool_parsers.reasoning import list_reasoning_formats
from tests.text.tool_parsers.writers import (
    ELEMENTS,
    GEMMA,
    PYTHONIC,
    SCHEMAS,
    TAGGED,
    WRITERS,
    dump,
    make_parser,
    parse,
)

FAMILIES = sorted(row.name for row in TOOL_FORMATS)
families = pytest.mark.parametrize("family", FAMILIES)
NO_TEXT_WITH_CALLS = ("llama4_pythonic", "xlam", "kimi_k3")  # calls begin as any text may, or texts have tokens around
TOOLS = {
    "get_weather": {**SCHEMAS["get_weather"], "required": ["city", "days"], "additionalProperties": False},
    "f": {"type": "object", "properties": {"text": {"type": "string"}}, "additionalProperties": False},
}


def make_grammar(
    family: str,
    kind: MessageKind,
    *,
    schemas: Any = TOOLS,
    parallel: bool = True,
    reasoning: ReasoningState = "over",
    reasoning_parser: str = "qwen3",
    find_token: Callable[[str], int | None] = lambda marker: None,
) -> str | None:
    """Return the grammar as the engine gets it, in which content is a JSON object."""
    message = MessageOutline(kind, schemas, parallel, reasoning)
    row = list_tool_formats()[family]
    thoughts = list_reasoning_formats()["openai_gptoss" if row.harmony else reasoning_parser]
    frame = make_message_grammar(message, row, thoughts, find_token)
    if frame is None or "content" not in kind:
        return frame
    constraint = constrain_content(frame, constrain_to_schema(JSON_OBJECT, ""), "")
    return write_lark(constraint.kind, constraint.text)


BYTES = llguidance.LLTokenizer("byte")


@lru_cache(maxsize=4)  # a test asks for several texts of the same grammar
def compile_grammar(grammar: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.get_error(), f"{matcher.get_error()} in {grammar}"
    return matcher


def accepts(grammar: str | None, text: str) -> bool:
    assert grammar is not None
    matcher = compile_grammar(grammar).deep_copy()
    tokens = BYTES.tokenize_str(text)
    return bool(
        matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
    )


def write(family: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    if family in PYTHONIC:  # the values as JSON writes them, which the parser takes, too
        each = [f"{name}({', '.join(f'{key}={dump(value)}' for key, value in given.items())})" for name, given in calls]
        form = list_tool_formats()[family].form
        return form.before + form.between.join(each) + form.after
    text = WRITERS[family](calls)
    if family == "kimi_k3":  # of which forced calls do not say the types
        text = re.sub(r'type="\w+"', 'type="string"', text)
    if family == "phi4_mini_json":  # which writes lists after either of two markers
        text = text.replace("functools", "<|tool_call|>") + "<|/tool_call|>"
    if family in ELEMENTS:  # an object without properties in its schema is written in JSON
        mark = list_tool_formats()[family].form.mark
        text = text.replace(f"{mark}<x>{mark}<item>1{mark}</item>{mark}</x>", '{"x": [1]}')
    return text


EVERY: dict[str, Any] = {"city": 'Z\u00fcrich <b> "a"', "days": -3, "share": 0.5, "exact": True}
EVERY |= {"places": [{"x": [1]}], "options": None}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", EVERY),
    ("get_weather", {"city": "", "days": 1}),
    ("get_weather", {"city": "a", "days": 1, "options": None}),
    ("f", {}),
]


# ---------------------------------------------------------------- calls alone
@families
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_grammar_admits_what_the_family_writes(family: str, call: tuple[str, dict[str, Any]]) -> None:
    text = write(family, [call])
    assert accepts(make_grammar(family, "calls"), text), text
    assert accepts(make_grammar(family, "calls", parallel=False), text), text
    assert parse(make_parser(family), [text])[2] == [call]


@families
@pytest.mark.parametrize("kind", ["calls", "calls or content"])
def test_it_admits_nothing_else(family: str, kind: MessageKind) -> None:
    grammar = make_grammar(family, kind)
    good = write(family, [("get_weather", {"city": "Rome", "days": 1})])
    assert accepts(grammar, good)
    for wrong in ("", "Hello!", good[:-1], good.replace("get_weather", "get_time"), good.replace("city", "town")):
        assert not accepts(grammar, wrong) or wrong == good[:-1].rstrip() or json.loads(wrong), wrong
    if family != "llama3_json" or kind == "calls":  # whose calls are JSON objects, as content is
        assert not accepts(grammar, write(family, [("get_weather", {"city": "Rome", "days": "many"})]))
        assert not accepts(grammar, write(family, [("get_weather", {"days": 1})]))


@families
def test_white_space_in_arguments_has_an_end(family: str) -> None:
    if family not in TAGGED | PYTHONIC | GEMMA | ELEMENTS:
        text = write(family, [("get_weather", {"city": "Rome", "days": 1})])
        wide = text.replace('"days": 1', '"days":' + " " * 99 + "1")
        assert wide != text
        assert not accepts(make_grammar(family, "calls"), wide)


@families
def test_texts_of_a_list(family: str) -> None:
    """Also where arguments are texts between tags."""
    for schema in ({"enum": ["a", "b<"]}, {"type": "string", "enum": ["a", "b<"]}):
        tools = {"f": {"type": "object", "properties": {"text": schema}, "required": ["text"]}}
        grammar = make_grammar(family, "calls", schemas=tools)
        written = write(family, [("f", {"text": "b<"})])
        assert accepts(grammar, re.sub(r"<!\[CDATA\[(.*)]]>", r"\1", written))  # MiniCPM's parser also takes it plain
        assert not accepts(grammar, write(family, [("f", {"text": "c"})]))
        assert not accepts(grammar, write(family, [("f", {})]))


WITHOUT_TOKENS = ("llama3_json", "llama4_pythonic", "minicpm5", "xlam")  # whose calls begin with plain text
IN_TOKENS: list[tuple[str, MessageKind]] = [
    *((family, "calls") for family in FAMILIES if family not in WITHOUT_TOKENS),
    *((family, "text with calls") for family in FAMILIES if family not in (*WITHOUT_TOKENS, *NO_TEXT_WITH_CALLS)),
]


def list_tokens(family: str) -> list[str]:
    """Return the markers that models of the family have special tokens for; what is `bare` is plain text."""
    row = list_tool_formats()[family]
    markers = set(row.markers) - set(row.bare)
    return sorted(marker for marker in markers if not any(other in marker and other != marker for other in markers))


@pytest.mark.parametrize(("family", "kind"), IN_TOKENS)
def test_markers_that_are_special_tokens_are_named(family: str, kind: MessageKind) -> None:
    """Also where a marker is only a part of a text: a model that writes tokens could not go on with their text."""
    tokens = list_tokens(family)
    ids = {token: 200 + number for number, token in enumerate(tokens)}
    grammar = make_grammar(family, kind, find_token=ids.get)
    assert grammar is not None
    assert any(f"<[{token}]>" in grammar for token in ids.values())
    assert not [token for token in tokens if dump(token)[1:-1] in grammar]
    assert not llguidance.LLMatcher(BYTES, grammar, log_level=0).get_error()


@pytest.mark.parametrize(("family", "kind"), IN_TOKENS)
def test_calls_in_special_tokens(family: str, kind: MessageKind) -> None:
    """As a model writes them, whose tokenizer has a token for each marker."""
    tokens = list_tokens(family)
    tokenizer = make_tokenizer(tokens)
    grammar = make_grammar(family, kind, find_token=tokenizer.token_to_id)
    guiding = llguidance.LLTokenizer(tokenizer.to_str())
    for call in CALLS:
        ids = tokenizer.encode(write(family, [call])).ids
        assert set(ids) & {tokenizer.token_to_id(token) for token in tokens}
        matcher = llguidance.LLMatcher(guiding, grammar, log_level=0)
        assert matcher.consume_tokens(ids), (call, grammar)
        assert matcher.is_accepting()


def make_tokenizer(special: list[str]) -> Tokenizer:
    """Return a tokenizer of single bytes and of these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special, "<eos>"])
    return tokenizer


def test_special_tokens_within_other_markers_are_named() -> None:
    """A token is no text for the model, also where a marker is a token and a text."""
    grammar = make_grammar(
        "gigachat3",
        "calls",
        reasoning="possible",
        reasoning_parser="gemma4",
        find_token={"<|channel>": 7, "<|function_call|>": 8}.get,
    )
    assert grammar is not None
    assert '<[7]> "thought"' in grammar
    assert "<[8]>" in grammar
    assert not llguidance.LLMatcher(BYTES, grammar, log_level=0).get_error()


# ---------------------------------------------------------------- calls or content, calls within a text
@families
def test_calls_or_content(family: str) -> None:
    grammar = make_grammar(family, "calls or content")
    final = "<|channel|>final<|message|>" if list_tool_formats()[family].harmony else ""
    for call in CALLS:
        assert accepts(grammar, write(family, [call]))
    for content in ("{}", '{"a": "<tool_call>"}'):
        assert accepts(grammar, final + content)
        assert not accepts(grammar, f"{final}{content} {write(family, [('f', {})])}")
    assert not accepts(grammar, f"{final}[]")
    assert accepts(make_grammar(family, "content"), final + "{}")
    assert not accepts(make_grammar(family, "content"), write(family, [("f", {})])) or family == "llama3_json"


@families
def test_calls_within_a_text(family: str) -> None:
    if family in NO_TEXT_WITH_CALLS:
        assert make_grammar(family, "text with calls") is None
        return
    grammar, single = make_grammar(family, "text with calls"), make_grammar(family, "text with calls", parallel=False)
    is_harmony = list_tool_formats()[family].harmony
    final = "<|channel|>final<|message|>" if is_harmony else ""
    for text in ("", "Hello.", "<tool> { [ functions"):
        assert accepts(grammar, final + text), text
        assert accepts(single, final + text), text
    before = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" if is_harmony else "I look.\n"
    for call in CALLS:
        assert accepts(grammar, before + write(family, [call])), call
        assert accepts(single, before + write(family, [call])), call
    wrong = write(family, [("get_weather", {"city": "Rome", "days": "many"})])
    assert not accepts(grammar, before + wrong)
    assert not accepts(single, before + wrong)
    if not is_harmony:
        one, other = before + write(family, [CALLS[0]]), write(family, [CALLS[3]])
        assert accepts(grammar, f"{one} And: {other} So.")
        assert not accepts(grammar, f"{one} And: {wrong}")
        assert accepts(single, f"{one} And: {wrong}"), "of which nothing is returned"


@pytest.mark.parametrize("family", ["llama3_json", "minicpm5"])
def test_calls_without_a_marker_are_held_from_their_arguments_on(family: str) -> None:
    """As the guide says: one that begins otherwise, or is of another tool, is text for the grammar."""
    grammar = make_grammar(family, "text with calls", schemas={"get_weather": TOOLS["get_weather"]})
    assert accepts(grammar, write(family, [CALLS[0]]))
    assert not accepts(grammar, write(family, [("get_weather", {"city": "Rome", "days": "many"})]))
    assert accepts(grammar, write(family, [("f", {"text": "a"})]))


@pytest.mark.parametrize("kind", ["calls", "content", "calls or content"])
def test_no_comment_stands_beside_constrained_content_or_required_calls(kind: MessageKind) -> None:
    """In gpt-oss's channel `commentary` it would be content."""
    grammar = make_grammar("openai", kind)
    end = write("openai", [CALLS[0]]) if kind == "calls" else "<|channel|>final<|message|>{}"
    part = "<|channel|>{}<|message|>I look.<|end|><|start|>assistant"
    assert accepts(grammar, part.format("analysis") + end)
    assert not accepts(grammar, part.format("commentary") + end)


# ---------------------------------------------------------------- reasoning
@pytest.mark.parametrize("name", [row for row in list_reasoning_formats() if row not in ("openai_gptoss", "gpt_oss")])
def test_reasoning_before_content(name: str) -> None:
    row = list_reasoning_formats()[name]
    for closing in row.closing:
        thought = f"Hm, {{}} or <b>.\n{closing}\n\n"
        opened = make_grammar("hermes", "content", reasoning="open", reasoning_parser=name)
        assert accepts(opened, thought + "{}")
        assert not accepts(opened, "{}")
        assert not accepts(opened, thought + "no")
        over = make_grammar("hermes", "content", reasoning="over", reasoning_parser=name)
        assert accepts(over, "{}")
        assert not accepts(over, thought + "{}")
        possible = make_grammar("hermes", "content", reasoning="possible", reasoning_parser=name)
        assert accepts(possible, "{}")
        for opening in row.opening:
            assert accepts(possible, f"{opening}{thought}{{}}")
            assert not accepts(possible, f"{opening}{thought}x")


@pytest.mark.parametrize("kind", ["calls", "calls or content"])
def test_reasoning_before_calls(kind: MessageKind) -> None:
    call = write("hermes", [CALLS[0]])
    assert accepts(make_grammar("hermes", kind, reasoning="possible"), call)
    assert accepts(make_grammar("hermes", kind, reasoning="possible"), f"<think>\nHm.\n</think>\n\n{call}")
    assert accepts(make_grammar("hermes", kind, reasoning="open"), f"\nHm.\n</think>\n\n{call}")
    harmony = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{write('openai', [CALLS[0]])}"
    assert accepts(make_grammar("openai", kind), harmony)


# ---------------------------------------------------------------- schemas
def nest(schema: dict[str, Any], levels: int) -> dict[str, Any]:
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
RICH = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "list": {"type": "array", "items": {"enum": ["a", 1, None, True]}, "minItems": 2, "maxItems": 3},
        "node": {"$ref": "#/$defs/node"},
    },
    "required": ["count"],
    "$defs": {"node": {**NODE, "additionalProperties": False}},
}


@families
@pytest.mark.parametrize(
    ("arguments", "is_accepted"),
    [
        ({"count": 1}, True),
        ({"count": 9, "list": ["a", 1]}, True),
        ({"count": 9, "list": [None, True, "a"], "node": {"next": {"next": None}}}, True),
        ({"count": 9, "node": {"next": {}}}, True),
        ({"count": 0}, False),
        ({"list": ["a", 1]}, False),
        ({"count": 1, "list": ["a"]}, False),
        ({"count": 1, "list": ["a"] * 4}, False),
        ({"count": 1, "list": ["a", "b"]}, False),
        ({"count": 1, "node": {"other": None}}, False),
    ],
    ids=str,
)
def test_schemas_are_held_to(family: str, arguments: dict[str, Any], is_accepted: bool) -> None:
    """In every notation: bounds, numbers of items, lists of values, and references that refer to themselves."""
    grammar = make_grammar(family, "calls", schemas={"f": RICH})
    written = {key: arguments[key] for key in sorted(arguments)}
    assert accepts(grammar, write(family, [("f", written)])) is is_accepted


MALFORMED: list[Any] = [
    {"type": "array", "items": {"type": "string"}, "minItems": "3", "maxItems": -1},
    {"type": "array", "items": {"type": "string"}, "minItems": 10**9, "maxItems": 10**12},
    {"type": "array", "minItems": 5, "maxItems": 2},
    {"type": []},
    {"type": ["x", 5]},
    {"type": {}},
    {"anyOf": []},
    {"anyOf": ["x", 5, None]},
    {"type": "object", "properties": {"b": 5, "c d": {}, "": {}}},
    {"type": "object", "properties": ["b"]},
    {"type": "object", "properties": {"b": {}}, "required": 5},
    {"$ref": "#/properties/a"},
    {"$ref": "#/$defs/x"},
    nest({"type": "string"}, 200),
]


@families
@pytest.mark.parametrize("schema", MALFORMED, ids=lambda schema: str(schema)[:60])
def test_malformed_schemas_give_a_grammar(family: str, schema: Any) -> None:
    """llguidance may refuse the grammar, and says why."""
    tool = {
        "type": "object",
        "properties": {"a": schema},
        "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}},
    }
    assert make_grammar(family, "calls", schemas={"f": tool})
