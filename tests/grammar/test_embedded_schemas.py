"""The schemas within Lark grammars are adapted like those that stand alone, and the rest stays as it is."""

from __future__ import annotations

import pytest

from server.grammar.embedded_schemas import adapt_embedded_schemas
from server.grammar.lark import write_lark
from server.text.errors import GrammarError
from tests.grammar.judge import GrammarJudge


@pytest.mark.parametrize(
    "schema",
    [
        '{"const": 9007199254740993}',
        '\n  {"enum": [1,\n  9223372036854775808]}',
        '{"$ref": "#/own/id", "own": {"id": {"const": 9007199254740993}}}',
    ],
)
def test_numbers_that_would_be_written_as_others_are_refused(schema: str) -> None:
    for grammar in (f"start: %json {schema}", f'start: "%json" id // "\nid: /[%"]/ %json{schema} <|"|>\n'):
        with pytest.raises(GrammarError, match=r"^%json: .*make it a string"):
            write_lark("grammar", grammar)


def test_schemas_are_adapted() -> None:
    judge = GrammarJudge()
    schema = '{"type": "integer",\n\n"minimum": -9223372036854775808}'
    grammar = write_lark("grammar", f'start: "a" %json {schema} "b" | %json {{"type": "string", "format": "byte"}}')
    for text in ("a-1000000000000000000b", "a7b", '"x"'):
        assert judge.accepts(grammar, text)
    assert not judge.accepts(grammar, "a7")


def test_lines_keep_their_numbers() -> None:
    schema = '{\n"format": "byte",\n"type": "string"\n}'
    adapted = adapt_embedded_schemas(f"start: %json {schema}\nlast: nowhere")
    assert "byte" not in adapted
    assert adapted.splitlines().index("last: nowhere") == 4


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "%json {" /%json {"const": 9007199254740993}/',
        '// %json {"const": 9007199254740993}\nstart: "x" # %json {"const": 9007199254740993}',
        'start: %json {"const": 5.0, "title":  "a"}',
        'start: %json {"const": "\\u00e4\ud800", "minimum": 1e400, "format": "byte"}',
        'start: %json {"format": NaN}',
        'start: "never ends %json {"const": 9007199254740993}',
        "start: %json",
        "start: %json " + "[" * 100_000,
        "start: " + "/\\" * 100_000,
        '%llguidance {"no_forcing": "%json"}\nstart: %regex {"substring_words": "%json {"}',
    ],
)
def test_the_rest_of_a_grammar_stays_as_it_is(grammar: str) -> None:
    assert adapt_embedded_schemas(grammar) == grammar
