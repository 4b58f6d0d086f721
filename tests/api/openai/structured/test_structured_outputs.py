"""The fields that say what a text has to be: which grammar the engine gets, and the text that it completes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from server.engine.ipc.messages import Submit, Tokens
from tests.api.fake_engine import FakeEngine, admitted
from tests.api.payloads import VALID_REQUEST, Encode
from tests.grammar.judge import GrammarJudge

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
GBNF = 'root ::= "a" [0-9]'


@pytest.fixture(scope="module")
def judge() -> GrammarJudge:
    return GrammarJudge()


@pytest.mark.parametrize(
    ("sent", "accepted", "refused"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"a": [1]}', "{}"], ["[1]", "1"]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT, "strict": True}}},
            ['{"x": 1}', '{\n  "x": 1\n}', '{"x":1}'],
            ["{}", '{"x":  1}', '{"x":1,"y":2}', '{"x":1.5}'],
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}, ["1", "[{}]"], ["x"]),
        ({"structured_outputs": {"json": POINT}}, ['{"x": 1}'], ["{}"]),
        ({"structured_outputs": {"json": json.dumps(POINT)}}, ['{"x": 1}'], ["{}"]),
        ({"structured_outputs": {"json": POINT, "disable_any_whitespace": True}}, ['{"x":1}'], ['{"x": 1}']),
        ({"structured_outputs": {"json": POINT, "whitespace_pattern": "[ ]{2}"}}, ['{"x":  1}'], ['{"x": 1}']),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
        ({"structured_outputs": {"regex": r"a/\d{2}|ü+"}}, ["a/12", "üü"], ["a/1", "xa/12", "a/123"]),
        ({"structured_outputs": {"choice": ["yes", 'a "b"\n', "é"]}}, ["yes", 'a "b"\n', "é"], ["y", "yes "]),
        ({"structured_outputs": {"grammar": GBNF}}, ["a1"], ["a", "a12"]),
        ({"structured_outputs": {"grammar": '?start: "a" | b\nb: "b" b?'}}, ["a", "bb"], ["ab"]),
        ({"guided_json": POINT}, ['{"x": 1}'], ["{}"]),
        ({"guided_json": POINT, "guided_whitespace_pattern": "_"}, ['{_"x":1}'], ['{"x": 1}']),
        ({"guided_regex": "^ab?$", "guided_decoding_backend": "xgrammar"}, ["a", "ab"], ["abb"]),
        ({"guided_choice": ["1", "2"]}, ["1"], ["3"]),
        ({"guided_grammar": 'start: "a"+'}, ["aaa"], [""]),
        ({"grammar": GBNF}, ["a1"], ["b"]),
        ({"json_schema": POINT}, ['{"x": 1}'], ["{}"]),
        ({"json_schema": {"x-guidance": {"lenient": True}, "enum": [1, 2]}}, ["1"], ["3"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_engine_gets_a_grammar_of_these_texts(
    engine: FakeEngine,
    http: httpx.Client,
    judge: GrammarJudge,
    path: str,
    sent: dict[str, Any],
    accepted: Any,
    refused: Any,
) -> None:
    body = VALID_REQUEST if path == "completions" else CHAT
    answer = http.post(f"/v1/{path}", json=body | sent)
    assert answer.status_code == 200, answer.text
    grammars = {submit.grammar for submit in engine.all(Submit)}
    assert len(grammars) == 1
    (grammar,) = grammars
    for text in accepted:
        assert judge.accepts(grammar, text), text
    for text in refused:
        assert not judge.accepts(grammar, text), text


@pytest.mark.parametrize("sent", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
def test_any_text(engine: FakeEngine, http: httpx.Client, sent: dict[str, Any]) -> None:
    assert http.post("/v1/completions", json=VALID_REQUEST | sent).is_success
    assert [submit.grammar for submit in engine.all(Submit)] == [None]


def test_all_choices_have_the_grammar(engine: FakeEngine, http: httpx.Client) -> None:
    body = VALID_REQUEST | {"prompt": ["a", "b"], "n": 2, "best_of": 3, "guided_regex": "a+"}
    assert http.post("/v1/completions", json=body).is_success
    grammars = [submit.grammar for submit in engine.all(Submit)]
    assert len(grammars) == 6
    assert len(set(grammars)) == 1


def test_the_token_that_completes_a_text_is_part_of_it(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    tokens = encode("yes")

    def complete(submit: Submit) -> Any:
        return [[admitted(submit), Tokens(submit.request_id, tokens, "stop", completes_grammar=True)]]

    for stream in (False, True):
        engine.script = complete
        answer = http.post("/v1/completions", json=VALID_REQUEST | {"guided_choice": ["yes"], "stream": stream})
        assert '"yes"' in answer.text
        assert '"finish_reason":"stop"' in answer.text


def test_a_schema_has_a_largest_size(engine: FakeEngine, http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json=VALID_REQUEST | {"guided_regex": "a" * 2**18 + "b"})
    assert answer.status_code == 400
    assert "(max_grammar_bytes)" in answer.json()["error"]["message"]
    assert engine.all(Submit) == []


def test_constraints_and_refusals_are_counted(engine: FakeEngine, http: httpx.Client) -> None:
    sent: list[tuple[dict[str, Any], int]] = [
        ({"response_format": {"type": "json_object"}}, 200),
        ({"response_format": {"type": "text"}}, 200),
        ({"json_schema": POINT, "n": 3}, 200),
        ({"guided_regex": "a+"}, 200),
        ({"guided_choice": ["a"]}, 200),
        ({"guided_choice": ["b"]}, 200),
        ({"grammar": GBNF}, 200),
        ({"guided_regex": "a(", "n": 2}, 400),
        ({"guided_json": {"not": {}}}, 400),
        ({"guided_regex": "a" * 2**18 + "b"}, 400),
        ({}, 200),
    ]
    http.get("/metrics")  # for which the counts of earlier tests are sent to the engine
    engine.counts.clear()
    for fields, status in sent:
        assert http.post("/v1/completions", json=VALID_REQUEST | fields).status_code == status
    http.get("/metrics")
    assert engine.counts.constraints == {"json": 2, "regex": 1, "choice": 2, "grammar": 1}
    assert engine.counts.refusals == {"invalid": 2, "too_large": 1}


@pytest.mark.parametrize("depth", [127, 500, *range(930, 970, 2), 3000])
def test_a_schema_that_is_nested_too_deeply(engine: FakeEngine, http: httpx.Client, depth: int) -> None:
    """Also where JSON could be read, but not be written again, as more of Python's stack is in use then."""
    schema = '{"items":' * depth + "{}" + "}" * depth
    bodies = {
        "completions": VALID_REQUEST | {"guided_json": schema},
        "chat/completions": CHAT | {"structured_outputs": {"json": schema}},
    }
    for path, body in bodies.items():
        as_object = json.dumps(body).replace(json.dumps(schema), schema)
        for sent in (json.dumps(body), as_object):
            answer = http.post(f"/v1/{path}", content=sent, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, answer.text
            if depth < 900:
                assert "nested too deeply; move parts of it into $defs" in answer.json()["error"]["message"]


@pytest.mark.parametrize("text", [r'{"const": "\ud800"}', '{"minimum": NaN}', "{", "3"])
def test_the_text_of_a_schema_is_json_as_bodies_are(engine: FakeEngine, http: httpx.Client, text: str) -> None:
    answer = http.post("/v1/completions", json=VALID_REQUEST | {"structured_outputs": {"json": text}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs.json"
