"""The benchmark of grammars: both libraries get the same grammars, and times are those of texts by them."""

from __future__ import annotations

import random

import pytest
from llguidance import LLTokenizer

from server.grammar.lark import write_lark
from server.grammar.matcher import TokenTable
from server.text.encoder import Encoder
from tests.grammar.judge import GrammarJudge
from tests.models.random_models import byte_tokenizer
from tools.bench.grammars.__main__ import GRAMMARS
from tools.bench.grammars.libraries import time_llguidance, write_for_xgrammar
from tools.bench.grammars.timing import GrammarTimes, format_rows


@pytest.fixture(scope="module")
def table() -> TokenTable:
    return TokenTable(Encoder(byte_tokenizer(258)).vocabulary)


@pytest.fixture(scope="module")
def tokenizer(table: TokenTable) -> LLTokenizer:
    return table.make_tokenizer()


@pytest.mark.parametrize("name", ["choice of 1,000", "arithmetic"])
def test_grammars_that_are_written_anew_accept_the_same_texts(rng: random.Random, name: str) -> None:
    judge, constraint = GrammarJudge(), GRAMMARS[name]
    form, gbnf = write_for_xgrammar(constraint)
    assert form == "gbnf"
    ours, theirs = write_lark(constraint.kind, constraint.text), write_lark("grammar", gbnf)
    alphabet, found = ("()+-12" if name == "arithmetic" else ["value ", *"0123456789"]), set()
    texts = ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 7))) for _ in range(80)]
    for text in [*texts, "(1+2)-1" if name == "arithmetic" else "value 70", "7 value "]:
        accepted = judge.accepts(ours, text)
        assert judge.accepts(theirs, text) is accepted, text
        found.add(accepted)
    assert found == {True, False}


def test_rows(table: TokenTable) -> None:
    times = time_llguidance(table, {"arithmetic": GRAMMARS["arithmetic"]})["arithmetic"]
    assert isinstance(times, GrammarTimes)
    assert times.tokens >= 2000
    assert 0 < times.mean_us <= times.tokens * times.p99_us
    rows = format_rows({"llguidance": {"arithmetic": times}, "other": {"arithmetic": "it has no such grammar"}})
    assert len(rows) == 4
    assert rows[2].startswith("| arithmetic | llguidance | ")
    assert rows[3] == "| arithmetic | other | it has no such grammar | | |"
