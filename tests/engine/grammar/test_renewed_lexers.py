"""Texts of one grammar, which share a lexer: one that reaches its limits ends no text but that which needs as much."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import numpy as np
import pytest

from server.engine.grammar.compiler import GrammarCompiler
from server.engine.grammar.state import GrammarState
from server.grammar import matcher
from server.grammar.constraint import Constraint, constrain_to_choices
from server.grammar.lark import write_lark
from server.text.processes.sandbox import load_vocabulary
from server.text.vocabulary import Vocabulary
from tests.engine.engine_driver import Driver
from tests.engine.fake_proposer import FakeProposer
from tests.engine.grammar.constrained import SETTINGS, Case, compute_alone, read, submit

FEW_STATES = 300  # of a lexer
PATTERN = "(a|b)*a(a|b){18}"  # each text needs few of its 2 ** 18 states, and other ones than other texts
CASE = Case(Constraint("regex", PATTERN, ""), lambda text: re.fullmatch(PATTERN, text) is not None, 60)


@pytest.fixture(scope="module")
def compiler(model: Path) -> GrammarCompiler:
    vocabulary = load_vocabulary(model)
    return GrammarCompiler(lambda: vocabulary, len(vocabulary.tokens))


def begin(compiler: GrammarCompiler, lark: str) -> GrammarState:
    """Return a state at the start of a grammar, of which a spare matcher is compiled meanwhile."""
    while not compiler.prepare(lark):
        time.sleep(0.001)
    state = compiler.make_state(lark)
    wait_for_spare(compiler, state)
    return state


def wait_for_spare(compiler: GrammarCompiler, state: GrammarState) -> None:
    """Wait for the spare matcher of a grammar that takes long to compile; others have none."""
    while state._grammar._order_spare is not None and state._grammar._spare is None:
        compiler.collect()
        time.sleep(0.001)


def write_token(state: GrammarState, rng: random.Random) -> int | None:
    """Append an allowed token at random, or return None at the end of the text."""
    (mask,) = state.compute_masks((), (), ())
    allowed = np.flatnonzero(mask)
    if not len(allowed) or state.is_complete:
        return None
    token = int(rng.choice(allowed))
    state.accept(token)
    return token


def test_a_long_list_of_choices_serves_any_number_of_texts(
    compiler: GrammarCompiler, vocabulary: Vocabulary, rng: random.Random
) -> None:
    """At the limits in use: all texts of this list need more states than a lexer may have."""
    choices = {"".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=20)) for _ in range(2000)}
    lark = write_lark("choice", constrain_to_choices(sorted(choices), "").text)
    state = begin(compiler, lark)
    first = state._start
    ids = {vocabulary.token_bytes(token): token for token in range(2, vocabulary.num_ids)}
    for choice in choices:
        state = compiler.make_state(lark)
        wait_for_spare(compiler, state)
        for character in choice.encode():
            (mask,) = state.compute_masks((), (), ())
            assert mask[ids[bytes([character])]], (choice, state.fault)
            state.accept(ids[bytes([character])])
        assert state.fault is None
        assert state.is_complete
    assert state._start is not first


def test_texts_that_are_written_by_turns(
    compiler: GrammarCompiler, vocabulary: Vocabulary, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each goes on with a new lexer where it was, also if the old one is exhausted within its draft."""
    monkeypatch.setattr(matcher, "MAX_LEXER_STATES", FEW_STATES)
    lark = write_lark("regex", PATTERN)
    states = [begin(compiler, lark) for _ in range(8)]
    firsts, written = {id(state._start) for state in states}, [b""] * len(states)
    for _ in range(60):
        for index, state in enumerate(states):
            if state.is_complete or state.fault is not None:
                continue
            wait_for_spare(compiler, state)
            if rng.random() < 0.3:
                state.cut_draft([token for token in range(2, vocabulary.num_ids) if rng.random() < 0.1][:4])
            token = write_token(state, rng)
            if token is not None:
                written[index] += vocabulary.token_bytes(token)
    assert [state.fault for state in states] == [None] * len(states)
    for text in written:
        assert re.fullmatch(PATTERN, text.decode()) or re.fullmatch("[ab]*", text.decode()), text
    assert {id(state._start) for state in states} != firsts


def test_a_text_that_exhausts_a_lexer_alone_ends(compiler: GrammarCompiler, rng: random.Random) -> None:
    state = begin(compiler, write_lark("regex", "(a{1,1000}){1,1000}"))
    other = compiler.make_state(write_lark("regex", "(a{1,1000}){1,1000}"))
    for _ in range(10):
        write_token(other, rng)
    for _ in range(200):
        wait_for_spare(compiler, state)
        if state.fault is not None:
            break
        write_token(state, rng)
    assert state.fault is not None
    assert "too much work" in state.fault
    wait_for_spare(compiler, other)
    assert write_token(other, rng) is not None
    assert other.fault is None


def test_requests_of_one_grammar_are_answered_as_alone(
    model: Path, vocabulary: Vocabulary, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six run side by side, with drafts, and need more states than a lexer has."""
    alone = Driver(model, **SETTINGS)  # at the limits in use
    numbers = [rng.randrange(2**20) for _ in range(12)]
    bias = tuple((token, 4.0) for token in range(2, 260) if vocabulary.token_bytes(token) in (b"a", b"b"))
    expected = {number: compute_alone(alone, CASE, number, logit_bias=bias) for number in numbers}
    monkeypatch.setattr(matcher, "MAX_LEXER_STATES", FEW_STATES)
    driver = Driver(model, **SETTINGS)
    heard = {}
    for number in numbers:
        heard[number] = submit(driver, str(number), CASE, number, logit_bias=bias)
        request = driver.request(str(number))
        whole = [*request.tokens, *expected[number].tokens]
        request.proposer = FakeProposer(whole, count=4, right=0.7, seed=number)
    (compiled,) = {id(request.grammar._grammar): request.grammar._grammar for request in driver.requests}.values()
    first = compiled.start
    driver.run()
    for number in numbers:
        assert heard[number].failed is None, heard[number].failed
        assert heard[number].tokens == expected[number].tokens
        text = read(vocabulary, heard[number])
        assert CASE.accepts(text) or (heard[number].finish_reason == "length" and set(text) <= {"a", "b"})
    assert compiled.start is not first
    driver.assert_nothing_leaked()
