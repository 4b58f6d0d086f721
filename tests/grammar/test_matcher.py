"""The masks of compiled grammars for tokenizers of several kinds, compared with a search of all texts."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from server.engine.grammar.compiled import CompiledGrammar
from server.engine.grammar.state import GrammarState
from server.grammar.constraint import constrain_to_choices
from server.grammar.lark import write_lark
from server.grammar.matcher import GrammarChecker, TokenTable, compile_grammar
from server.text.encoder import Encoder
from server.text.errors import GrammarError
from tests.text.tiny_tokenizers import KINDS

ALPHABET = 'abc hello\n"\\{}[]<>/é世😀\u2581'
EOS = 1


def make_texts(rng: random.Random) -> list[str]:
    return ["".join(rng.choices(ALPHABET, k=rng.randrange(1, 9))) for _ in range(rng.randrange(1, 6))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [-3, 0, 37], ids="{} logits more than tokens".format)
def test_masks_are_those_of_a_search(rng: random.Random, kind: str, padding: int) -> None:
    """Tokens with equal bytes are all allowed, special ones and ids beyond the tokenizer's never."""
    vocabulary = Encoder(KINDS[kind]()).vocabulary
    table = TokenTable(vocabulary)
    tokenizer = table.make_tokenizer()
    count = min(vocabulary.num_ids, vocab_size := vocabulary.num_ids + padding)
    data = [b"" if token in vocabulary.special_ids else vocabulary.token_bytes(token) for token in range(count)]
    walked = 0
    while walked < 20:  # tokens, in as many texts as it takes
        texts = [text.encode() for text in make_texts(rng)]
        constraint = constrain_to_choices([text.decode() for text in texts], "")
        compiled = compile_grammar(tokenizer, write_lark("choice", constraint.text))
        state = GrammarState(CompiledGrammar(compiled, table.end_id), vocab_size)
        written = b""
        while True:
            expected = np.zeros(vocab_size, np.bool_)
            for token, added in enumerate(data):
                expected[token] = added != b"" and any(text.startswith(written + added) for text in texts)
            if written in texts:
                expected[EOS] = True
            (mask,) = state.compute_masks((), (EOS,), (EOS,))
            if not expected.any():
                assert not mask.any()
                break  # the vocabulary cannot spell any of the texts further
            assert np.array_equal(mask, expected), (texts, written)
            choices = [int(token) for token in np.flatnonzero(expected) if token != EOS]
            if not choices:
                break
            token = rng.choice(choices)
            state.accept(token)
            written += data[token]
            walked += 1
            assert state.is_complete == (not any(text != written and text.startswith(written) for text in texts))
            if state.is_complete:
                break


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_cut_and_leave_no_trace(rng: random.Random, kind: str) -> None:
    vocabulary = Encoder(KINDS[kind]()).vocabulary
    table = TokenTable(vocabulary)
    lark = write_lark("regex", "[a-z ]{0,40}")
    compiled = compile_grammar(table.make_tokenizer(), lark)
    state, plain = (GrammarState(CompiledGrammar(compiled, table.end_id), vocabulary.num_ids) for _ in range(2))
    for _ in range(12):
        (mask,) = plain.compute_masks((), (), ())
        allowed = np.flatnonzero(mask)
        if not len(allowed):
            break
        draft: list[int] = []
        for _ in range(4):  # the beginning of the draft may be allowed
            (*_, last) = state.compute_masks(draft, (), ())
            if not last.any():
                break
            draft.append(int(rng.choice(np.flatnonzero(last))))
        kept = state.cut_draft([*draft, EOS])
        assert kept == draft[: len(kept)]
        assert len(kept) >= len(draft) - 1
        with_draft = state.compute_masks([*draft, EOS, 5], (), ())
        assert np.array_equal(with_draft[0], mask)
        assert not with_draft[-1].any()
        token = int(rng.choice(allowed))
        state.accept(token)
        plain.accept(token)
        assert state.fault is plain.fault is None
        assert state.is_complete == plain.is_complete
        if plain.is_complete:
            break


def test_a_state_that_a_draft_has_ruined_is_made_again(rng: random.Random) -> None:
    """After a token that is not allowed, llguidance gives up a matcher for good."""
    vocabulary = Encoder(KINDS["byte_level"]()).vocabulary
    table = TokenTable(vocabulary)
    compiled = compile_grammar(table.make_tokenizer(), write_lark("regex", "[a-z]{0,9}"))
    state, plain = (GrammarState(CompiledGrammar(compiled, table.end_id), vocabulary.num_ids) for _ in range(2))
    for _ in range(6):
        for each in (state, plain):
            (mask,) = each.compute_masks((), (), ())
        (wrong,) = [token for token in range(vocabulary.num_ids) if vocabulary.token_bytes(token) == b"Q"][:1]
        state.compute_masks([wrong], (), ())
        assert np.array_equal(state.compute_masks((), (), ())[0], mask)
        token = next(int(token) for token in np.flatnonzero(mask) if len(vocabulary.token_bytes(int(token))) == 1)
        state.accept(token)
        plain.accept(token)
    assert state.fault is None


def test_a_text_that_cannot_be_continued_ends_although_the_end_token_is_ignored() -> None:
    """The vocabulary has no token for the second text's last character, so the text is complete without it."""
    vocabulary = Encoder(KINDS["metaspace"]()).vocabulary
    table = TokenTable(vocabulary)
    (start,) = [token for token in range(2, vocabulary.num_ids) if vocabulary.token_bytes(token) == b"h"]
    compiled = compile_grammar(table.make_tokenizer(), write_lark("choice", '["h", "h\\u4e16"]'))
    state = GrammarState(CompiledGrammar(compiled, table.end_id), vocabulary.num_ids)
    for expected in (start, EOS):
        (mask,) = state.compute_masks((), (), (EOS,))
        assert np.flatnonzero(mask).tolist() == [expected]
        assert not state.is_complete
        state.accept(expected)
    assert state.fault is None
    assert state.is_complete


def test_an_error_names_what_is_wrong() -> None:
    checker = GrammarChecker(Encoder(KINDS["byte_level"]()).vocabulary)
    for schema, words in (
        ({"not": {"type": "null"}}, '"not"'),
        ({"properties": {"a": {"contains": {}}}}, '"contains"'),
        ({"type": "string", "pattern": "(?<=a)b"}, "look-behind"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"type": "array", "maxItems": "many"}, "maxItems"),
        ({"format": "iri"}, "iri"),
        ({"type": "string", "maxLength": 10**12}, "a length .* is too large"),
        ({"type": "integer", "maximum": 10**400}, "number out of range$"),
    ):
        with pytest.raises(GrammarError, match=words):
            checker.check("json_schema", json.dumps(schema))


def test_an_error_says_what_to_change() -> None:
    checker = GrammarChecker(Encoder(KINDS["byte_level"]()).vocabulary)
    nested: object = {"type": "integer"}
    for _ in range(100):
        nested = {"type": "object", "properties": {"a": nested}}
    with pytest.raises(GrammarError, match="nested too deeply; move parts of it into"):
        checker.check("json_schema", json.dumps(nested))
    optional = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(3000)}}
    with pytest.raises(GrammarError, match=r"too much work for one token.*send a simpler one"):
        checker.check("json_schema", json.dumps(optional))
    patterns = [{"type": "string", "pattern": f"^(.*{letter}.*){{3}}$"} for letter in "abcdefgh" * 20]
    with pytest.raises(GrammarError) as caught:
        checker.check("json_schema", json.dumps({"allOf": patterns}))
    assert len(str(caught.value)) < 400


def test_a_regular_expression_that_would_be_changed_is_refused() -> None:
    checker = GrammarChecker(Encoder(KINDS["byte_level"]()).vocabulary)
    for regex in ("\\", "a\\", "[ab]\\\\\\"):
        with pytest.raises(GrammarError, match="ends with a single backslash"):
            checker.check("regex", regex)
    checker.check("regex", "a\\\\")
    with pytest.raises(GrammarError, match="comments of several lines"):
        checker.check("regex", "(?x) a # first\n b")
    checker.check("regex", "(?x) a b # last")
