"""Grammars of required calls: llguidance accepts what each family writes, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from server.text.tool_parsers.call_forms import make_call_grammar
from server.text.tool_parsers.formats import TOOL_FORMATS, list_tool_formats
from tests.text.tool_parsers.writers import PYTHONIC, SCHEMAS, WRITERS, make_parser, parse

llguidance: Any = pytest.importorskip("llguidance", reason="grammars are checked with llguidance")

WITH_GRAMMAR = sorted(row.name for row in TOOL_FORMATS if row.name not in PYTHONIC)
TOOLS = {
    "get_weather": {**SCHEMAS["get_weather"], "required": ["city", "days"], "additionalProperties": False},
    "f": {"type": "object", "properties": {"text": {"type": "string"}}, "additionalProperties": False},
}


def accepts(family: str, text: str, **how: Any) -> bool:
    row = list_tool_formats()[family]
    assert row.form is not None
    options: dict[str, Any] = {"parallel": True, "token_id": lambda marker: None, "markers": row.markers} | how
    grammar = make_call_grammar(row.form, TOOLS, **options)
    assert grammar is not None
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("lark", grammar))
    assert not matcher.get_error(), f"{matcher.get_error()} in {grammar}"
    tokens = tokenizer.tokenize_str(text)
    return bool(
        matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
    )


def write(family: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    text = WRITERS[family](calls)
    if family == "phi4_mini_json":  # which writes lists after either of two markers
        text = text.replace("functools", "<|tool_call|>") + "<|/tool_call|>"
    return text


@pytest.mark.parametrize("family", WITH_GRAMMAR)
def test_a_grammar_admits_what_the_family_writes(family: str) -> None:
    every: dict[str, Any] = {"city": 'Z\u00fcrich <b> "a"', "days": -3, "share": 0.5, "exact": True}
    every |= {"places": [{"x": [1]}], "options": None}
    for call in (("get_weather", every), ("get_weather", {"city": "", "days": 1}), ("f", {})):
        text = write(family, [call])
        assert accepts(family, text), text
        assert accepts(family, text, parallel=False), text
        assert parse(make_parser(family), [text])[2] == [call]


@pytest.mark.parametrize("family", WITH_GRAMMAR)
def test_it_admits_nothing_else(family: str) -> None:
    good = write(family, [("get_weather", {"city": "Rome", "days": 1})])
    assert accepts(family, good)
    for wrong in ("", "Hello!", good[:-1], good.replace("get_weather", "get_time"), good.replace("city", "town")):
        assert not accepts(family, wrong) or wrong == good[:-1].rstrip(), wrong
    assert not accepts(family, write(family, [("get_weather", {"city": "Rome", "days": "many"})]))
    assert not accepts(family, write(family, [("get_weather", {"days": 1})]))


@pytest.mark.parametrize("family", ["hermes", "mistral", "deepseek_v31"])
def test_markers_that_are_special_tokens_are_named(family: str) -> None:
    row = list_tool_formats()[family]
    assert row.form is not None
    ids = {marker: 1000 + number for number, marker in enumerate(row.markers)}
    grammar = make_call_grammar(row.form, TOOLS, parallel=True, token_id=ids.get, markers=row.markers)
    assert grammar is not None
    assert f"<[{ids[row.begins[0]]}]>" in grammar
    assert row.begins[0] not in grammar


@pytest.mark.parametrize("family", sorted(PYTHONIC))
def test_calls_in_python_have_none(family: str) -> None:
    row = list_tool_formats()[family]
    assert row.form is not None
    assert make_call_grammar(row.form, TOOLS, parallel=True, token_id=lambda _: None, markers=()) is None
