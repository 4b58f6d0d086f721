"""Grammars are checked in a process with limits: one that takes all time or memory delays only other grammars."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from server.grammar.constraint import Constraint
from server.text.errors import GrammarError, TextLimitError, TextRefused, TextUnavailable
from server.text.processes import grammar_checks
from server.text.processes.messages import CheckGrammar, Encoded
from server.text.processes.sandbox import CallLimits, SandboxedTokenizer
from server.text.tokenizer import Tokenizer
from tests.text.hostile_models import save_tokenizer
from tests.text.tiny_tokenizers import KINDS, byte_level

TEXTS = CallLimits(60.0, 2**30)
TIGHT = CallLimits(0.6, 2**28)
CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(50_000)) + '\nr50000: "a"'
SLOW = {"type": "integer", "multipleOf": 99_999_989}
MANY = " & ".join(f"/.*a{i}.*/" for i in range(300))
BOMBS = {  # and the codes of their refusals, of which the machine decides
    "a number of many remainders": (Constraint("json_schema", json.dumps(SLOW), ""), {"timeout", "memory"}),
    "a chain of rules": (Constraint("grammar", CHAIN, ""), {"crash", "timeout"}),
    "an intersection": (Constraint("grammar", f"start: TEXT\nTEXT: {MANY}", ""), {"timeout", "memory"}),
}
DEEP = '{"items":' * 3000 + "{}" + "}" * 3000
REFUSED = {
    "too deep": Constraint("json_schema", DEEP, ""),
    "too many texts": Constraint("json_schema", json.dumps({"enum": [f"value {i}" for i in range(100_000)]}), ""),
    "an unknown rule": Constraint("grammar", "start: nowhere", ""),
    "a bad expression": Constraint("regex", "a(", ""),
    "nothing": Constraint("json_schema", "false", ""),
    "no text": Constraint("grammar", "start: start", ""),
    "deep GBNF": Constraint("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, ""),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_alone(tmp_path: Path, name: str) -> None:
    """Texts are encoded meanwhile, and the next grammar is checked afterwards."""
    directory = save_tokenizer(tmp_path, byte_level())
    hello = asyncio.run(Tokenizer.from_directory(directory).encode("hello"))
    constraint, codes = BOMBS[name]

    async def use() -> None:
        async with SandboxedTokenizer(directory, TEXTS, TIGHT) as tokenizer:
            bomb = asyncio.create_task(tokenizer.check_grammar(constraint))
            encoded = 0
            while not bomb.done():
                assert await tokenizer.encode("hello") == hello
                encoded += 1
                await asyncio.sleep(0.01)
            with pytest.raises(TextLimitError) as error:
                await bomb
            assert error.value.code in {f"grammar_{code}" for code in codes}
            assert encoded > 1
            assert "start: TEXT" in await tokenizer.check_grammar(Constraint("regex", "a+", ""))

    asyncio.run(use())


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    """And the next grammar is checked, whatever became of the process."""
    directory = save_tokenizer(tmp_path, byte_level())

    async def use() -> None:
        async with SandboxedTokenizer(directory, TEXTS) as tokenizer:
            for name, constraint in REFUSED.items():
                print(name)
                with pytest.raises((GrammarError, TextLimitError)):
                    await tokenizer.check_grammar(constraint)
                assert await tokenizer.check_grammar(Constraint("choice", json.dumps([name]), ""))

    asyncio.run(use())


@pytest.mark.parametrize("kind", KINDS)
def test_the_process_and_this_one_write_the_same_grammar(tmp_path: Path, kind: str) -> None:
    directory = save_tokenizer(tmp_path, KINDS[kind]())
    constraint = Constraint("regex", ".{2,3}", "")

    async def use() -> Any:
        async with SandboxedTokenizer(directory, TEXTS) as tokenizer:
            return await tokenizer.check_grammar(constraint), await tokenizer.check_grammar(constraint)

    assert set(asyncio.run(use())) == {asyncio.run(Tokenizer.from_directory(directory).check_grammar(constraint))}


def test_a_known_grammar_is_not_checked_again(tmp_path: Path) -> None:
    """It is found although the process, which another grammar ended, would first have to start again."""
    directory = save_tokenizer(tmp_path, byte_level())

    async def use() -> None:
        async with SandboxedTokenizer(directory, TEXTS, TIGHT) as tokenizer:
            constraint = Constraint("regex", "a+", "")
            first = await tokenizer.check_grammar(constraint)
            bomb = asyncio.create_task(tokenizer.check_grammar(BOMBS["a chain of rules"][0]))
            await asyncio.sleep(0)
            began = time.monotonic()
            assert await tokenizer.check_grammar(constraint) == first
            assert not bomb.done()
            assert time.monotonic() - began < 60
            with pytest.raises(TextLimitError):
                await bomb

    asyncio.run(use())


def test_a_bomb_that_is_sent_again_and_again_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it does not keep other grammars waiting; after a while it is checked anew."""
    monkeypatch.setattr(grammar_checks, "LIMIT_SECONDS", 0.1)
    calls: list[str] = []

    async def run(call: CheckGrammar) -> Encoded:
        calls.append(call.text)
        await asyncio.sleep(0.01)
        raise TextLimitError("too slow", "grammar_timeout") if call.text == "bomb" else GrammarError("wrong")

    async def use() -> None:
        checks = grammar_checks.GrammarCheckCache(run)
        bombs = [asyncio.create_task(checks.check(CheckGrammar("regex", "bomb"))) for _ in range(5)]
        await asyncio.sleep(0)
        bombs[0].cancel()
        for bomb in bombs[1:]:
            with pytest.raises(TextLimitError):
                await bomb
        with pytest.raises(TextLimitError):
            await checks.check(CheckGrammar("regex", "bomb"))
        for _ in range(2):
            with pytest.raises(GrammarError):
                await checks.check(CheckGrammar("regex", "a("))
        assert calls == ["bomb", "a("]
        await asyncio.sleep(0.2)
        for call in ("bomb", "a("):
            with pytest.raises(TextRefused):
                await checks.check(CheckGrammar("regex", call))
        assert calls == ["bomb", "a(", "bomb"]

    asyncio.run(use())


def test_results_of_checks_are_forgotten_in_their_order() -> None:
    calls: list[str] = []

    async def run(call: CheckGrammar) -> Encoded:
        calls.append(call.text)
        if call.text == "later":
            raise TextUnavailable("try again")
        return Encoded(text=call.text)

    async def use() -> None:
        checks = grammar_checks.GrammarCheckCache(run)
        for number in range(grammar_checks.MAX_CACHED + 2):
            assert (await checks.check(CheckGrammar("regex", f"{number}"))).text == f"{number}"
            await checks.check(CheckGrammar("regex", "0"))
        assert calls == [f"{number}" for number in range(grammar_checks.MAX_CACHED + 2)]
        await checks.check(CheckGrammar("regex", "1"))
        assert calls[-1] == "1"
        for _ in range(2):
            with pytest.raises(TextUnavailable):
                await checks.check(CheckGrammar("regex", "later"))
        assert calls[-2:] == ["later", "later"]

    asyncio.run(use())
