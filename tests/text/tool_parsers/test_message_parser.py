"""Messages of every family: calls, reasoning and text are told apart, wherever the text is cut."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from server.text.tool_parsers.calls import merge_calls
from server.text.tool_parsers.formats import TOOL_FORMATS, list_tool_formats
from server.text.tool_parsers.message_parser import MAX_REREAD, MessageParser
from server.text.tool_parsers.reasoning import list_reasoning_formats
from tests.text.tool_parsers.writers import (
    ELEMENTS,
    GEMMA,
    IN_PARTS,
    OWN_LINES,
    PYTHONIC,
    SCHEMAS,
    TAGGED,
    WRITERS,
    dump,
    make_parser,
    parse,
    parse_in_order,
)

EXAMPLES = 8  # of each family: most families share their readers with others, and each run draws others
SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=EXAMPLES)
FAMILIES = sorted(WRITERS)
families = pytest.mark.parametrize("family", FAMILIES)

WORDS = st.text(st.sampled_from("ab {}[]()<>\"'\\,:;=/\n\u00e9\u2603\U0001f600|"), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def draw_arguments(
    keys: st.SearchStrategy[str], values: st.SearchStrategy[Any], min_options: int = 0
) -> st.SearchStrategy[dict[str, Any]]:
    """Return arguments of each type, with objects of these keys and values; an object of options has `min_options`."""
    return st.fixed_dictionaries(
        {},
        optional={
            "city": WORDS,
            "days": st.integers(),
            "share": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "exact": st.booleans(),
            "places": st.lists(st.dictionaries(keys, values, max_size=2), max_size=2),
            "options": st.none() | st.dictionaries(keys, values, min_size=min_options, max_size=2),
        },
    )


TYPED = draw_arguments(WORDS, JSON)
BARE_KEYS = st.text(st.sampled_from("ab_\u00e9-."), min_size=1, max_size=4)
BARE = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(BARE_KEYS, inner, max_size=3),
    max_leaves=6,
)


# The types of what is in a nested element are those of its text, where the schema does not say more
UNTYPED = st.recursive(
    st.booleans() | st.integers() | st.text(st.sampled_from("ab<>/\u00e9"), min_size=1),
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(BARE_KEYS, inner, min_size=1, max_size=3),
    max_leaves=6,
)
NESTED = draw_arguments(BARE_KEYS, UNTYPED, min_options=1)


def has_no_quote(calls: list[tuple[str, dict[str, Any]]]) -> bool:
    """Return whether no text has one of Gemma's quotes, for which there is no escape."""
    return '<|"|>' not in repr(calls).replace("\\", "")


@cache
def calls_of(family: str) -> st.SearchStrategy[list[tuple[str, dict[str, Any]]]]:
    """Return random calls that the family can write."""
    if family in TAGGED:  # a value is text, and its type is the schema's
        one = st.tuples(st.just("get_weather"), TYPED) | st.tuples(st.just("f"), st.fixed_dictionaries({"text": WORDS}))
    elif family in GEMMA:
        one = st.tuples(st.sampled_from(sorted(SCHEMAS)), st.dictionaries(BARE_KEYS, BARE, max_size=3))
        return st.lists(one, min_size=1, max_size=3).filter(has_no_quote)
    elif family in ELEMENTS:
        one = st.tuples(st.just("get_weather"), NESTED) | st.tuples(
            st.just("f"), st.fixed_dictionaries({"text": WORDS})
        )
    elif family in PYTHONIC:
        one = st.tuples(st.sampled_from(["get_weather", "f"]), TYPED)
    else:
        one = st.tuples(st.sampled_from(sorted(SCHEMAS)), st.dictionaries(WORDS, JSON, max_size=3) | TYPED)
    return st.lists(one, min_size=1, max_size=3)


def cut(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12), label="cuts"))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def starts_and_ends_are_kept(calls: list[tuple[str, dict[str, Any]]]) -> bool:
    """Return whether no text begins or ends with the line break that some families put around values."""
    texts = [value for _, arguments in calls for value in arguments.values() if isinstance(value, str)]
    return all(text == text.strip("\n") for text in texts)


@families
@SETTINGS
@given(data=st.data())
def test_calls_are_found_wherever_the_text_is_cut(family: str, data: st.DataObject) -> None:
    calls = data.draw(calls_of(family))
    assume(family not in OWN_LINES or starts_and_ends_are_kept(calls))
    text = WRITERS[family](calls)
    for pieces in (cut(data, text), [text], list(text)):
        assert parse(make_parser(family), pieces) == ("", "", calls)


@families
@SETTINGS
@given(data=st.data())
def test_only_the_first_call_without_parallel_calls(family: str, data: st.DataObject) -> None:
    calls = data.draw(calls_of(family))
    assume(family not in OWN_LINES or starts_and_ends_are_kept(calls))
    pieces = cut(data, WRITERS[family](calls))
    assert parse(make_parser(family, parallel=False), pieces) == ("", "", calls[:1])


@cache
def pieces_of(family: str) -> st.SearchStrategy[str]:
    """Return random texts of markers, pieces of calls, and anything else."""
    row = list_tool_formats()[family]
    whole = WRITERS[family]([("f", {"text": "a{b}"}), ("get_weather", {})])
    parts = [
        *row.markers,
        "<think>",
        "</think>",
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        "\\",
        "\n",
        " ",
        "f(",
        ")",
        "to=functions.f",
        *"()[]{}",
    ]
    parts += [whole[start : start + 9] for start in range(0, len(whole), 9)] + [whole, "word", "\U0001f600"]
    return st.lists(st.sampled_from(parts), max_size=14).map("".join)


@families
@SETTINGS
@given(data=st.data())
def test_any_text_is_the_same_message_wherever_it_is_cut(family: str, data: st.DataObject) -> None:
    text = data.draw(pieces_of(family), label="text")
    parser = make_parser(family, "qwen3")
    content, reasoning, _ = parse(parser, [text])
    whole = parse_in_order(make_parser(family, "qwen3"), [text])
    assert "".join(text for channel, text in whole if channel == "content") == content
    assert "".join(text for channel, text in whole if channel == "reasoning") == reasoning
    assert len(whole) >= parser.calls.count
    assert parse_in_order(make_parser(family, "qwen3"), cut(data, text)) == whole
    assert parse_in_order(make_parser(family, "qwen3"), list(text)) == whole


@families
@SETTINGS
@given(data=st.data())
def test_what_is_no_call_stays_text(family: str, data: st.DataObject) -> None:
    """If no call is found, no character is lost, except those of gpt-oss's headers."""
    text = data.draw(pieces_of(family), label="text")
    content, _, calls = parse(make_parser(family), cut(data, text))
    assume(not calls)
    if list_tool_formats()[family].harmony:
        content, text = (
            re.sub(r"<\|\w+\|>|assistant|commentary|analysis|final|json|to=functions.f", "", each)
            for each in (content, text)
        )
        assert set(content) <= set(text)
    else:
        assert content == text


GARBAGE = ["\\u00", "\\ud83d", "\\", '"', "'", "\n", "\x00", "NaN", "{" * 200, "[" * 130, "}", "]", ")", '<|"|>', "]]>"]


@families
@SETTINGS
@given(data=st.data())
def test_damaged_calls_are_calls_or_text(family: str, data: st.DataObject) -> None:
    """No text of a model is an error, and its parts do not depend on the cuts."""
    text = WRITERS[family](data.draw(calls_of(family)))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 30)))
        inserted = data.draw(st.sampled_from(["", text[start:end] * 2, *GARBAGE, *list_tool_formats()[family].markers]))
        text = text[:start] + inserted + text[end:]
    whole = parse(make_parser(family), [text])
    assert parse(make_parser(family), cut(data, text)) == whole
    assert parse(make_parser(family), list(text)) == whole
    assert all(isinstance(arguments, dict) for _, arguments in whole[2]) or family in IN_PARTS
    assert whole[2] or whole[0] == text or list_tool_formats()[family].harmony


@pytest.mark.parametrize("family", ["hermes", "mistral", "qwen3_coder", "gemma4", "olmo3", "lfm2"])
def test_thousands_of_calls(family: str) -> None:
    calls: list[tuple[str, Any]] = [("f", {"text": str(number)}) for number in range(3000)]
    assert parse(make_parser(family), [WRITERS[family](calls)]) == ("", "", calls)


@families
def test_a_call_may_be_long(family: str) -> None:
    """Longer than what may be read twice, in one argument; most of its characters mean something in some format."""
    call: tuple[str, dict[str, Any]] = ("f", {"text": "x" + "{[(\"'\\<>,:" * 30_000 + "x"})
    text = WRITERS[family]([call])
    assert len(text) > MAX_REREAD
    pieces = [text[start : start + 1000] for start in range(0, len(text), 1000)]
    assert parse(make_parser(family), pieces) == ("", "", [call])


@families
def test_a_call_that_is_cut_off_is_text(family: str) -> None:
    """As at max_tokens: up to the character with which it is certain, and later none of it is text."""
    text = WRITERS[family]([("get_weather", {"city": "Rome", "days": 2})])
    certain = next(size for size in range(len(text) + 1) if parse(make_parser(family), [text[:size]])[2])
    assert certain == text.index('{"city') + 1 if family in IN_PARTS else certain > len(text) * 2 // 3
    for size in {0, certain - 1, *random.sample(range(certain), certain // 4)}:
        content, reasoning, calls = parse(make_parser(family), list(text[:size]))
        assert (reasoning, calls) == ("", [])
        if not list_tool_formats()[family].harmony:
            assert content == text[:size]
    if family in IN_PARTS:
        for size in {certain, *random.sample(range(certain, len(text)), (len(text) - certain) // 4)}:
            arguments, (content, _, calls) = read_parts(family, text[:size]), parse(make_parser(family), [text[:size]])
            assert '{"city": "Rome", "days": 2}'.startswith(arguments)
            assert len(arguments) == min(size - certain + 1, 27)
            assert len(calls) == 1
            assert text[certain + 26 : size].endswith(content)


@families
def test_markers_that_a_cut_leaves_are_no_content_where_only_calls_can_follow(family: str) -> None:
    """Elsewhere they are text, as any other text may begin so."""
    row, call = list_tool_formats()[family], WRITERS[family]([("f", {"text": "a"})])
    marker = (*row.begins, *row.bare)[0]
    for size in range(1, len(marker) + 1):
        for pieces in ([marker[:size]], list(marker[:size])):
            assert parse(make_parser(family, "qwen3", calls_only=True), pieces) == ("", "", [])
            assert row.harmony or parse(make_parser(family, "qwen3"), pieces) == (marker[:size], "", [])
    found = parse(make_parser(family, calls_only=True), [call])
    assert found == ("", "", [("f", {"text": "a"})])
    for size in range(1, len(marker) + 1) if row.begins and not row.harmony else ():
        for pieces in ([call, "\n", marker[:size]], list(f"{call}\n{marker[:size]}")):
            assert parse(make_parser(family, calls_only=True), pieces) == found


@pytest.mark.parametrize("family", sorted(IN_PARTS))
def test_the_beginning_of_the_text_that_ends_a_call_is_no_content(family: str) -> None:
    """It can only be cut off where nothing but calls may follow."""
    row, text = list_tool_formats()[family], WRITERS[family]([("f", {"text": "a"})])
    arguments = text.index('{"text"') + len('{"text": "a"}')
    ends = [text.index(end, arguments) for end in row.ends if end in text[arguments:]]
    for size in range(min(ends, default=len(text)), len(text) + 1):
        for pieces in ([text[:size]], list(text[:size])):
            assert parse(make_parser(family, calls_only=True), pieces) == ("", "", [("f", {"text": "a"})])


def test_what_is_left_of_a_required_call_is_content_if_it_is_more_than_markers() -> None:
    """So nothing that the model has said is lost."""
    text = '<tool_call>\n{"name": "f'
    assert parse(make_parser("hermes", calls_only=True), list(text)) == (text, "", [])
    several = "<|tool_calls_section_begin|>\n<|tool_call_begin|>"
    assert parse(make_parser("kimi_k2", calls_only=True), list(several)) == ("", "", [])
    assert parse(make_parser("kimi_k2", calls_only=True), [f"{several}f"]) == (f"{several}f", "", [])
    assert parse(make_parser("hermes", "qwen3", calls_only=True), ["<thi"]) == ("", "", [])
    assert parse(make_parser("hermes", "qwen3", calls_only=True), ["<think>Hm.</th"]) == ("", "Hm.</th", [])


def read_parts(family: str, text: str) -> str:
    """Return the arguments of the only call in a text that arrives by single characters, of as many parts."""
    parser = make_parser(family)
    deltas = [*map(parser.push, text), parser.finish()]
    parts = [call for delta in deltas for call in delta.tool_calls]
    assert [bool(part.id) for part in parts] == [bool(part.name) for part in parts]
    assert [bool(part.id) for part in parts] == [True, *[False] * (len(parts) - 1)]
    # A line break in a string is two characters; what may begin the text after a call comes once it does not
    assert all(len(part.arguments) <= 2 or "<" in part.arguments for part in parts)
    return "".join(part.arguments for part in parts)


@pytest.mark.parametrize("family", sorted(IN_PARTS))
@SETTINGS
@given(data=st.data())
def test_arguments_come_in_parts(family: str, data: st.DataObject) -> None:
    """As the model writes them, wherever the text is cut."""
    arguments = data.draw(st.dictionaries(WORDS, JSON, max_size=3) | TYPED)
    separators = data.draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    written = json.dumps(arguments, ensure_ascii=data.draw(st.booleans()), separators=separators)
    empty = WRITERS[family]([("get_weather", {})])
    text = written.join(empty.rsplit("{}", 1))
    assert read_parts(family, text) == written
    pieces = [make_parser(family).push(text)]
    assert "".join(call.arguments for delta in pieces for call in delta.tool_calls) == written
    cut_off = text[: data.draw(st.integers(text.index(written) + 1, len(text)))]
    assert written.startswith(read_parts(family, cut_off))


TYPES = {"properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "any": {}}}
D = "\uff5cDSML\uff5c"
TYPED_PARAMETERS = {  # a call of f with one parameter: its key, whether it is marked as JSON, and its value
    "deepseek_v32": lambda key, is_json, value: (
        f'<{D}function_calls><{D}invoke name="f"><{D}parameter name="{key}" string="{dump(not is_json)}">{value}'
        f"</{D}parameter></{D}invoke></{D}function_calls>"
    ),
    "kimi_k3": lambda key, is_json, value: (
        f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="{key}" '
        f'type="{"number" if is_json else "string"}"<|sep|>{value}<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>"
    ),
}


@pytest.mark.parametrize("family", TYPED_PARAMETERS)
@pytest.mark.parametrize("schema", [TYPES, {"properties": {}}, {}])
@pytest.mark.parametrize(
    ("value", "read"),
    [("null", None), ("42", 42), ("true", True), ("[1, 2]", [1, 2]), ('{"a": "b"}', {"a": "b"}), ("no", "no")],
)
def test_a_type_that_a_call_states_counts_where_the_schema_has_none(
    family: str, schema: dict[str, Any], value: str, read: Any
) -> None:
    """As in vLLM, a text by the schema is a text, even if the call states that it is JSON."""

    def read_value(key: str, *, is_json: bool) -> Any:
        parser = MessageParser(list_tool_formats()[family], schemas={"f": schema})
        ((name, arguments),) = parse(parser, list(TYPED_PARAMETERS[family](key, is_json, value)))[2]
        assert (name, list(arguments)) == ("f", [key])
        return arguments[key]

    has_types = schema is TYPES
    assert read_value("text", is_json=True) == (value if has_types else read)
    assert read_value("count", is_json=True) == read
    assert read_value("any", is_json=True) == read
    assert read_value("other", is_json=True) == read
    assert read_value("text", is_json=False) == value
    assert read_value("count", is_json=False) == (read if has_types else value)
    assert read_value("other", is_json=False) == value


def test_only_attributes_state_a_type() -> None:
    """A key or a value may spell one."""
    for key, value in (("type", "1"), ("a", ' type="number"'), ("string", "2")):
        text = TYPED_PARAMETERS["kimi_k3"](key, False, value)
        assert parse(make_parser("kimi_k3"), [text])[2] == [("f", {key: value})]


def test_line_breaks_in_strings_are_escaped() -> None:
    """Also next to backslashes, and outside of strings they stay as they are."""
    written = '{\n"text": "a\nb\\\\\n\\"\tc",\n"x": "\\\\"\n}'
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    found = read_parts("hermes", text)
    assert json.loads(found) == json.loads(written, strict=False)
    assert found.count("\n") == 3


@families
def test_text_before_and_after_calls(family: str) -> None:
    row = list_tool_formats()[family]
    calls: list[tuple[str, dict[str, Any]]] = [("f", {"text": "a"}), ("get_weather", {"days": 1})]
    before, after = "I will look.", "Wait a moment."
    text = WRITERS[family](calls)
    if row.harmony:
        before = f"<|channel|>commentary<|message|>{before}<|end|><|start|>assistant"
        content = "I will look."
        assert parse(make_parser(family), list(before + text)) == (content, "", calls)
        return
    if row.bare_at_start and not text.startswith(row.begins):
        text = f"{row.begins[0]}{text}{row.ends[0]}"
    content, _, found = parse(make_parser(family), list(f"{before}\n\n{text}\n{after}\n"))
    assert found == calls
    assert content.split() == f"{before} {after}".split()


@families
def test_what_arguments_may_be(family: str) -> None:
    """None at all, and every type."""
    assert parse(make_parser(family), [WRITERS[family]([("f", {})])])[2] == [("f", {})]
    every: dict[str, Any] = {"city": 'a "b" \\ \u2603', "days": -3, "share": 0.5, "exact": True, "places": [{"x": [1]}]}
    every["options"] = None
    (call,) = parse(make_parser(family), [WRITERS[family]([("get_weather", every)])])[2]
    assert call == ("get_weather", every)
    assert {key: type(value) for key, value in call[1].items()} == {key: type(value) for key, value in every.items()}


@families
def test_plain_texts(family: str) -> None:
    for text in ("Hello, world!", "", " \n ", "a < b, {c} and [d]", '{"a": 1}', "x = [1, 2]\n", "f(1)"):
        assert parse(make_parser(family), list(text)) == (text, "", [])


@families
def test_a_family_is_described_completely(family: str) -> None:
    row = list_tool_formats()[family]
    assert row.in_template
    assert row.begins or row.bare


def test_each_row_has_a_writer() -> None:
    assert {row.name for row in TOOL_FORMATS} == set(FAMILIES)


@families
def test_calls_that_come_first(family: str) -> None:
    """Where content is constrained, what looks like a call within it is a part of it."""
    call = WRITERS[family]([("f", {"text": "a"})])
    row = list_tool_formats()[family]
    if not row.harmony:
        content = '["x", ' + json.dumps(call) + "]" + call
        for pieces in ([content], list(content)):
            assert parse(make_parser(family, calls_come_first=True), pieces) == (content, "", [])
            assert parse(make_parser(family, "qwen3", calls_come_first=True), ["<think>Hm.</think>", *pieces]) == (
                content,
                "Hm.",
                [],
            )
    found = parse(make_parser(family, calls_come_first=True), list(f"{call}\n{call}" if not row.harmony else call))
    assert found[2][:1] == [("f", {"text": "a"})]


@families
def test_parts_have_the_order_of_the_text(family: str) -> None:
    row = list_tool_formats()[family]
    if row.harmony or row.bare_at_start:
        return
    call = WRITERS[family]([("f", {"text": "a"})])
    text = f"<think>Hm.</think>I look.\n{call}\nWait.\n{call}\nDone."
    for pieces in ([text], list(text)):
        parts = parse_in_order(make_parser(family, "qwen3"), pieces)
        assert [name for name, _ in parts] == ["reasoning", "content", "f", "content", "f", "content"]
        assert [text.strip() for name, text in parts if name != "f"] == ["Hm.", "I look.", "Wait.", "Done."]


def test_python_calls_after_reasoning() -> None:
    text = "<think>Hm.</think>[f(text='a')]"
    assert parse(make_parser("llama4_pythonic", "qwen3"), list(text)) == ("", "Hm.", [("f", {"text": "a"})])


# ---------------------------------------------------------------- single formats
@pytest.mark.parametrize(
    ("family", "broken", "right"),
    [
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
         "<|tool_call_end|>", "<|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
         "<|tool_calls_section_end|>"),
        ("deepseek_v31", "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>f"
         "<\uff5ctool\u2581sep\uff5c>{}<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581call\u2581begin"
         "\uff5c>f<\uff5ctool\u2581sep\uff5c>{}<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end"
         "\uff5c>"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("arguments", ['{"x": bad', '{"x": "a', '{"x": {', '{"x": "a\\'])
def test_malformed_arguments_end_with_their_call(family: str, broken: str, right: str, arguments: str) -> None:
    text = broken.replace("{}", arguments) + right.replace("{}", '{"text": "a"}')
    for pieces in ([text], list(text)):
        parser = make_parser(family)
        parts = [*map(parser.push, pieces), parser.finish()]
        calls = merge_calls(call for part in parts for call in part.tool_calls)
        assert [(call.name, call.arguments) for call in calls] == [("f", arguments), ("f", '{"text": "a"}')]
        assert not any(part.content for part in parts)


@pytest.mark.parametrize(
    ("family", "before", "end"),
    [
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ("deepseek_v31", "<\uff5ctool\u2581call\u2581begin\uff5c>f<\uff5ctool\u2581sep\uff5c>",
         "<\uff5ctool\u2581call\u2581end\uff5c>"),
    ],
)  # fmt: skip
def test_arguments_may_spell_the_end_of_a_call(family: str, before: str, end: str) -> None:
    """In a string, unless the text goes on as it does after a call."""
    begins = list_tool_formats()[family].begins[0]
    value = {"text": f"a{end} b {end}c"}
    text = f"{begins}{before}{dump(value)}{end}"
    for pieces in ([text], list(text)):
        assert parse(make_parser(family), pieces) == ("", "", [("f", value)])


def test_a_call_is_found_after_an_answer_in_json() -> None:
    """However many brackets the answer has, of which each might begin a call."""
    answer = json.dumps({"type": "list", "items": [{"type": "x", "n": number} for number in range(3000)]})
    call = '<tool_call>\n{"name": "f", "arguments": {"text": "a"}}\n</tool_call>'
    content, _, calls = parse(make_parser("hermes"), [answer, "\n", call])
    assert (content.strip(), calls) == (answer, [("f", {"text": "a"})])


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"text\\": 1}"}</tool_call>', [("f", {"text": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"arguments": {"text": "</tool_call>"}, "name": "f"}', [("f", {"text": "</tool_call>"})]),  # noqa: E501
        ("hermes", '<tool_call>{"name": "f", "arguments": {"text": "a\nb"}}</tool_call>', [("f", {"text": "a\nb"})]),
        ("hermes", '<tool_call>[{"name": "f"}, {"name": "get_weather"}]</tool_call>', [("f", {}), ("get_weather", {})]),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}', [("f", {})]),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', [("unknown", {})]),
        ("hermes", '```json\n{\n  "name": "f",\n  "arguments": {"text": "```"}\n}\n```', [("f", {"text": "```"})]),
        ("hermes", '```\n{"name": "f", "arguments": {}}\n```\n{"name": "f"}', []),
        ("hermes", 'For example:\n```json\n{"name": "f", "arguments": {}}\n```', []),
        ("hermes", '```json\n{"name": "f", "arguments": {}}\n```\nCall it so.', []),
        ("hermes", '{"name": "f", "arguments": {"text": 1}}', []),
        ("hermes", '{"name": "unknown", "arguments": {}}', []),
        ("hermes", ' \n{"name": "get_weather", "arguments": {"days": 1, "share": 2}} \n', [("get_weather", {"days": 1, "share": 2})]),  # noqa: E501
        ("hermes", '```json\n[{"name": "f"}, {"name": "get_weather"}]```', [("f", {}), ("get_weather", {})]),
        ("hermes", '```json\n{"name": "f"}\n{"name": "f", "arguments": {}}\n```', [("f", {}), ("f", {})]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})]),
        ("llama3_json", 'So: {"name": "f", "parameters": {"text": "}"}} Right?', [("f", {"text": "}"})]),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', [("f", {})]),
        ("llama4_pythonic", "<|python_start|>[f(text='a')]<|python_end|>", [("f", {"text": "a"})]),
        ("llama4_pythonic", "[f(text='a', x=[true, null, -1.5, {'a': (1,)}])]", [("f", {"text": "a", "x": [True, None, -1.5, {"a": [1]}]})]),  # noqa: E501
        ("llama4_pythonic", r"[f(text='\d')]", [("f", {"text": r"\d"})]),
        ("mistral", '[TOOL_CALLS]f{"text": "a"}', [("f", {"text": "a"})]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"text": "a"}', [("f", {"text": "a"})]),
        ("mistral_v11", '[TOOL_CALLS][{"name": "f", "arguments": {}}]', [("f", {})]),
        ("granite", '<tool_call>[{"name": "f", "arguments": {}}]', [("f", {})]),
        ("phi4_mini_json", '<|tool_call|>[{"name": "f", "parameters": {}}]<|/tool_call|>', [("f", {})]),
        ("qwen3_coder", "<function=f>\n<parameter=text>\n\n a\n\n</parameter>\n</function>", [("f", {"text": "\n a\n"})]),  # noqa: E501
        ("qwen3_coder", "<function=get_weather>\n<parameter=exact>\nTrue\n</parameter>\n</function>", [("get_weather", {"exact": True})]),  # noqa: E501
        ("qwen3_coder", "<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n</function>", [("get_weather", {"days": "many"})]),  # noqa: E501
        ("qwen3_coder", "<function=f>\n<parameter=other>\n5\n</parameter>\n</function>", [("f", {"other": "5"})]),
        ("qwen3_coder", "<function=get_weather>\n<parameter=days>\n1\n<parameter=city>\nc\n</function>", [("get_weather", {"days": 1, "city": "c"})]),  # noqa: E501
        ("qwen3_coder", "<function=unknown>\n<parameter=a>\nb\n<parameter=c>\nd\n</function>", [("unknown", {"a": "b", "c": "d"})]),  # noqa: E501
        ("qwen3_coder", "<function=f>\n<parameter=text>\n<parameter=b>\n\n<parameter=\n</parameter>\n</function>", [("f", {"text": "<parameter=b>\n\n<parameter="})]),  # noqa: E501
        ("qwen3_coder", "<function=f>\n<parameter=text>\na\n<parameter=text>\nb\n</parameter>\n</function>", [("f", {"text": "a\n<parameter=text>\nb"})]),  # noqa: E501
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n</tool_call>", [("f", {"text": "a"})]),  # noqa: E501
        ("qwen3_coder", "<function=f>\n<parameter=text>\na\n</tool_call>\nb\n</parameter>\n</function>", [("f", {"text": "a\n</tool_call>\nb"})]),  # noqa: E501
        ("hermes", '{"name": "f", "arguments": "{\\"text\\": \\"a\\"}"}', [("f", {"text": "a"})]),
        ("deepseek_v32", '<\uff5cDSML\uff5cfunction_calls><\uff5cDSML\uff5cinvoke name="f"><\uff5cDSML\uff5cparameter name="x" string="false">[1, 2]</\uff5cDSML\uff5cparameter><\uff5cDSML\uff5cparameter name="y" string="false">no</\uff5cDSML\uff5cparameter><\uff5cDSML\uff5cparameter name="z" string="true">5</\uff5cDSML\uff5cparameter></\uff5cDSML\uff5cinvoke>', [("f", {"x": [1, 2], "y": "no", "z": "5"})]),  # noqa: E501
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n</minimax:tool_call>', [("f", {})]),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"text": "a"}}\n{"name": "f", "arguments": {}}\n</tool_call>', [("f", {"text": "a"}), ("f", {})]),  # noqa: E501
        ("glm45", "<tool_call>f\n<arg_key>text</arg_key><arg_value>5</arg_value></tool_call>", [("f", {"text": "5"})]),
        ("kimi_k2", '<|tool_call_begin|>functions.f<|tool_call_argument_begin|>{}<|tool_call_end|>', [("f", {})]),
        ("cohere_command3", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"text": "a"}},\n    {"tool_call_id": "1", "tool_name": "f", "parameters": {}}\n]<|END_ACTION|>', [("f", {"text": "a"}), ("f", {})]),  # noqa: E501
        ("internlm", 'Sure.<|action_start|><|plugin|>\n{"name": "f", "parameters": {"text": "Shanghai"}}<|action_end|>', [("f", {"text": "Shanghai"})]),  # noqa: E501
        ("jamba", '<tool_calls>[\n    {"name": "f", "arguments": {"text": "a"}},\n    {"name": "f", "arguments": {}}\n]</tool_calls>', [("f", {"text": "a"}), ("f", {})]),  # noqa: E501
        ("granite_20b_fc", '<function_call> {"name": "f", "arguments": {}} <function_call> {"name": "f", "arguments": {"text": "a"}}', [("f", {}), ("f", {"text": "a"})]),  # noqa: E501
        ("gemma4", '<|tool_call>call:f{text:<|"|>a, {b}<|"|>, x: [1,-2.5e3,true,None,{y:[]}]}<tool_call|>', [("f", {"text": "a, {b}", "x": [1, -2500.0, True, None, {"y": []}]})]),  # noqa: E501
        ("gemma4", '<|tool_call>call:f{<|"|>text<|"|>:<|"|>a<|"|>,"x":{<|"|>y<|"|>:1}}', [("f", {"text": "a", "x": {"y": 1}})]),  # noqa: E501
        ("gemma4", '<|tool_call>call:f{text:a b}', [("f", {"text": "a b"})]),
        ("functiongemma", "<start_function_call>call:get_weather{days:<escape>3<escape>,city:<escape>5<escape>}<end_function_call>", [("get_weather", {"days": 3, "city": "5"})]),  # noqa: E501
        ("olmo3", '<function_calls>f(text="a\nb")\nget_weather(days=1, exact=true, options=null)</function_calls>', [("f", {"text": "a\nb"}), ("get_weather", {"days": 1, "exact": True, "options": None})]),  # noqa: E501
        ("olmo3", "<function_calls>\nf(text='a')\n\nf()\n</function_calls>", [("f", {"text": "a"}), ("f", {})]),
        ("apertus", '<|tools_prefix|>[\n{"f": {"text": "a"}},\n{"unknown": {}}\n]<|tools_suffix|>', [("f", {"text": "a"}), ("unknown", {})]),  # noqa: E501
        ("gigachat3", 'Hm.\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {}}', [("f", {})]),
        ("minimax", '<tool_calls>\n{"name": "f", "arguments": {}}\n{"name": "unknown", "arguments": {}}', [("f", {}), ("unknown", {})]),  # noqa: E501
        ("minimax", '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>', [("f", {})]),
        ("minicpm5", '<function name="f"><param name="text"><![CDATA[</param>\n]]></param></function>', [("f", {"text": "</param>\n"})]),  # noqa: E501
        ("minimax_m3", ']<]minimax[>[<invoke name="get_weather">\n]<]minimax[>[<days>3]<]minimax[>[</days>\n]<]minimax[>[<places>\n]<]minimax[>[<item>{"a": 1}]<]minimax[>[</item>\n]<]minimax[>[</places>]<]minimax[>[</invoke>', [("get_weather", {"days": 3, "places": [{"a": 1}]})]),  # noqa: E501
        ("minimax_m3", ']<]minimax[>[<invoke name="get_weather">]<]minimax[>[<places>]<]minimax[>[</places>]<]minimax[>[</invoke>', [("get_weather", {"places": []})]),  # noqa: E501
        ("step3", '<steptml:invoke name="f"><steptml:parameter name="text">a</steptml:parameter></steptml:invoke>', [("f", {"text": "a"})]),  # noqa: E501
        ("hy_v3", "<tool_calls><tool_call>f<tool_sep></tool_call></tool_calls>", [("f", {})]),
        ("poolside_v1", "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n</tool_call>", [("f", {"text": "a"})]),  # noqa: E501
        ("llama4_pythonic", '{"name": "f", "parameters": {"text": "a"}}', [("f", {"text": "a"})]),
        ("xlam", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', [("f", {})]),
        ("xlam", '[TOOL_CALLS][{"name": "f", "arguments": {}}]', [("f", {})]),
        ("qwen3_coder", "<function=f><parameter=text>1</parameter><parameter=text>2</parameter></function>", [("f", {"text": "2"})]),  # noqa: E501
        ("hermes", '<tool_call>{"type": "function", "name": "f", "arguments": {}}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}</tool_call>', [("f", {})]),  # noqa: E501
        ("openai", ' to=functions.f<|channel|>commentary json<|message|>{"text": "a"}<|call|>', [("f", {"text": "a"})]),
        ("openai", '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"text": "a"}', [("f", {"text": "a"})]),  # noqa: E501
    ],
)  # fmt: skip
def test_ways_that_models_also_write(family: str, text: str, calls: list[tuple[str, Any]]) -> None:
    assert parse(make_parser(family), list(text))[2] == calls


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {"x": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {"x": %s}}</tool_call>' % ("9" * 5000)),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {"x": %s}}</tool_call>' % ("[" * 5000)),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}]</tool_call>'),
        ("hermes", "<tool_call>f</tool_call>"),
        ("hermes", '```json\n{"name": "unknown", "arguments": {}}\n```'),
        ("hermes", '```python\nf = {"name": 5}\n```'),
        ("hermes", '```json\n{"names": []}'),
        ("hermes", '{"name": "unknown", "arguments": {}}'),
        ("hermes", 'tools = [{"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {}}}]'),
        ("hermes", '```json\n[{"name": "f", "description": "F."}]\n```'),
        ("hermes", '{"type": "function", "function": {"name": "f", "description": "F.", "parameters": {}}}'),
        ("hermes", "<tool_call>(}</tool_call>"),
        ("mistral", "[TOOL_CALLS]unknown[ARGS](]"),
        ("granite_20b_fc", '<function_call> ("a"}'),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("llama3_json", '{"name": "f", "description": "F.", "parameters": {"type": "object"}}'),
        ("llama4_pythonic", "[f(1)]"),
        ("llama4_pythonic", "[f(**x)]"),
        ("llama4_pythonic", "[f(text=open('x'))]"),
        ("llama4_pythonic", "[f(text=b'x')]"),
        ("llama4_pythonic", "[unknown()]"),
        ("llama4_pythonic", "[f(text=%s)]" % ("(" * 5000)),
        ("lfm2", "<|tool_call_start|>f()<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(text=1, text=2)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[%sf()]<|tool_call_end|>" % ("a." * 2000)),
        ("lfm2", "<|tool_call_start|>[f(x=%s1)]<|tool_call_end|>" % ("-" * 5000)),
        ("lfm2", "<|tool_call_start|>[f(x=0x%s)]<|tool_call_end|>" % ("F" * 9999)),
        ("olmo3", "<function_calls>import os; f()</function_calls>"),
        ("gemma4", "<|tool_call>call:f{x:%s1" % ("[" * 500)),
        ("gemma4", "<|tool_call>call:f{:1}<tool_call|>"),
        ("gemma4", "<|tool_call>call:f{x:1,}<tool_call|>"),
        ("gemma4", '<|tool_call>call:f{x:<|"|>a<|"|>y:1}<tool_call|>'),
        ("gemma4", "<|tool_call>f{}<tool_call|>"),
        ("minimax_m3", ']<]minimax[>[<invoke name="f">]<]minimax[>[<text>a]<]minimax[>[</other>]<]minimax[>[</invoke>'),
        ("minimax_m3", ']<]minimax[>[<invoke name="f">]<]minimax[>[<text>a]<]minimax[>[<b>c]<]minimax[>[</b>]<]minimax[>[</text>'),  # noqa: E501
        ("minimax_m3", ']<]minimax[>[<invoke name="f">%s' % (']<]minimax[>[<a>' * 500)),
        ("apertus", '<|tools_prefix|>[{"f": 5}]<|tools_suffix|>'),
        ("xlam", '[{"name": "unknown", "arguments": {}}]'),
        ("xlam", '["a"]'),
        ("mistral", "[TOOL_CALLS]no call at all"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parametr=text>\na\n</parameter>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>text</arg_key>\n<arg_key>b</arg_key>\n</tool_call>"),
    ],
)  # fmt: skip
def test_malformed_calls_are_text(family: str, text: str) -> None:
    assert parse(make_parser(family), [text]) == (text, "", [])
    assert parse(make_parser(family), list(text)) == (text, "", [])
    good = WRITERS[family]([("f", {"text": "a"})])
    if not list_tool_formats()[family].bare_at_start and not text.endswith("[" * 9):
        assert parse(make_parser(family), list(f"{text}\n{good}"))[2][-1:] == [("f", {"text": "a"})]


@pytest.mark.parametrize(
    ("family", "text", "arguments", "content"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', '{"x": NaN}', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1]}}</tool_call> b', '{"x": 1', "]}}</tool_call> b"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}]</tool_call>', "{}", "]</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": {"a": "}"}}</tool_call>c', "{}", "c"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "a"}, {"x": 1}] d', "{}", ', {"x": 1}] d'),
        ("mistral_v11", '[TOOL_CALLS]f[ARGS]{"x": (1}', '{"x": (1}', ""),
        ("openai", '<|channel|>commentary to=functions.f<|message|>{"x": }}', '{"x": }', "}"),
    ],
)
def test_a_call_that_was_certain_and_goes_on_otherwise(family: str, text: str, arguments: str, content: str) -> None:
    """What was sent of it stays, and the rest is text."""
    for pieces in ([text], list(text), [text[:40], text[40:]]):
        parser = make_parser(family)
        deltas = [*map(parser.push, pieces), parser.finish()]
        assert "".join(delta.content for delta in deltas) == content
        assert "".join(call.arguments for delta in deltas for call in delta.tool_calls) == arguments


@pytest.mark.parametrize("family", ["mistral", "hermes"])
def test_an_empty_list_is_no_call(family: str) -> None:
    text = f"{list_tool_formats()[family].begins[0]}[] a"
    assert parse(make_parser(family), list(text)) == (text, "", [])


def test_half_of_a_surrogate_pair_is_escaped() -> None:
    parser = make_parser("hermes")
    (call,) = parser.push('<tool_call>{"name": "f", "arguments": {"text": "\\ud800"}}</tool_call>').tool_calls
    assert call.arguments == '{"text": "\\ud800"}'


def test_many_beginnings_cost_no_more_than_few() -> None:
    """A model that repeats the beginning of a call: what is read twice is bounded, then all is text."""
    text = '<tool_call>{"' * 100_000
    parser = make_parser("hermes")
    assert parse(parser, [text]) == (text, "", [])
    assert parser.budget < 0


def test_brackets_in_a_call_that_is_none_are_read_once_more_only() -> None:
    """Each begins like a call of Llama 3 that goes on to the end of the text."""
    text = '{"name":' * 30_000
    parser = make_parser("llama3_json")
    assert parse(parser, [text]) == (text, "", [])
    assert parser.budget < 0


@pytest.mark.parametrize(
    ("family", "pattern"),
    [("mistral", r"[A-Za-z0-9]{9}"), ("kimi_k2", r"functions\.f:0"), ("hermes", r"call_[0-9a-f]{24}")],
)
def test_ids_are_those_that_templates_take(family: str, pattern: str) -> None:
    (call,) = make_parser(family).push(WRITERS[family]([("f", {})])).tool_calls
    assert re.fullmatch(pattern, call.id)


# ---------------------------------------------------------------- reasoning
PAIRS = [
    (name, row.opening[0], row.closing[0]) for name, row in list_reasoning_formats().items() if row.opening
]  # fmt: skip


@pytest.mark.parametrize(("name", "opening", "closing"), PAIRS)
@SETTINGS
@given(data=st.data())
def test_reasoning_is_split_wherever_the_text_is_cut(
    name: str, opening: str, closing: str, data: st.DataObject
) -> None:
    words = st.text(st.sampled_from("ab<>/[]\n \u00e9\U0001f600"), max_size=20)
    reasoning, content = data.draw(words), data.draw(words)
    call = data.draw(st.sampled_from(["", WRITERS["hermes"]([("f", {})])]))
    text = f"{opening}{reasoning}{closing}{content}"
    expected = (content.strip() if call else content.lstrip(), reasoning.strip(), [("f", {})] if call else [])
    found = parse(make_parser("hermes", name), cut(data, text + call))
    assert (found[0].rstrip(), *found[1:]) == (expected[0].rstrip(), *expected[1:])
    opened = make_parser("hermes", name, reasoning_is_open=True)
    found = parse(opened, cut(data, f"{reasoning}{closing}{content}{call}"))
    assert (found[0].rstrip(), *found[1:]) == (expected[0].rstrip(), *expected[1:])


@pytest.mark.parametrize(("name", "opening", "closing"), PAIRS)
def test_reasoning_that_does_not_end(name: str, opening: str, closing: str) -> None:
    assert parse(make_parser("hermes", name), list(f"{opening} a b ")) == ("", "a b", [])


@pytest.mark.parametrize(("name", "opening", "closing"), PAIRS)
def test_only_the_beginning_of_a_message_is_reasoning(name: str, opening: str, closing: str) -> None:
    text = f"The marks are {opening} and {closing}."
    assert parse(make_parser("hermes", name), list(text)) == (text, "", [])


def test_a_call_ends_the_reasoning() -> None:
    text = "<think>I look.\n" + WRITERS["hermes"]([("f", {})]) + "Done."
    assert parse(make_parser("hermes", "qwen3"), list(text)) == ("Done.", "I look.", [("f", {})])
    broken = "<think>Then I write <tool_call> and so on.</think>Done."
    assert parse(make_parser("hermes", "qwen3"), list(broken)) == (
        "Done.",
        "Then I write <tool_call> and so on.",
        [],
    )


@pytest.mark.parametrize(
    ("name", "prompt", "is_open"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "what is <think>? <|im_start|>assistant\n", False),
        ("deepseek_r1", "<|Assistant|>", True),
        ("deepseek_r1", "<|Assistant|></think>", False),
        ("mistral", "[/INST]", False),
        ("gemma4", "<|turn>model\n", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
    ],
)
def test_whether_a_message_begins_within_reasoning(name: str, prompt: str, is_open: bool) -> None:
    assert list_reasoning_formats()[name].is_open(prompt) is is_open


def test_a_message_of_gemma() -> None:
    text = '<|channel>thought\nHm.\n<channel|><|tool_call>call:f{text:<|"|>a<|"|>}<tool_call|>'
    for pieces in ([text], list(text)):
        assert parse(make_parser("gemma4", "gemma4"), pieces) == ("", "Hm.", [("f", {"text": "a"})])


def test_a_message_of_kimi_k3() -> None:
    call = WRITERS["kimi_k3"]([("f", {"text": "a"}), ("get_weather", {"days": 1})])
    text = (
        f"Hm.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>{call}<|close|>message<|sep|>"
    )
    for pieces in ([text], list(text)):
        parser = make_parser("kimi_k3", "kimi_k3", reasoning_is_open=True)
        assert parse(parser, pieces) == ("I look.", "Hm.", [("f", {"text": "a"}), ("get_weather", {"days": 1})])
    without = MessageParser(None, list_reasoning_formats()["kimi_k3"], reasoning_is_open=True)
    assert parse(without, list(text))[:2] == ("I look." + call, "Hm.")


def test_a_message_of_gpt_oss() -> None:
    text = "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>final<|message|>Yes. \n"
    for pieces in ([text], list(text)):
        content, reasoning, calls = parse(make_parser("openai", "openai_gptoss"), pieces)
        assert (content.strip(), reasoning, calls) == ("Yes.", "Hm.", [])
