"""Times the same grammars in llguidance and in xgrammar, each by itself: masks, without what the engine adds."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from server.grammar.constraint import Constraint
from server.grammar.lark import write_lark
from server.grammar.matcher import TokenTable, compile_grammar
from tools.bench.grammars.timing import GrammarTimes, Matcher, list_tokens, time_grammar
from tools.peers.installer import Installer
from tools.peers.xgrammar import XGRAMMAR_VERSION, install_xgrammar

ROOT = Path(__file__).parents[3]
ARITHMETIC = 'root ::= e\ne ::= t (("+" | "-") t)*\nt ::= [0-9]+ | "(" e ")"'  # as GBNF
TIMEOUT = 280.0  # seconds for all grammars
Times = Mapping[str, GrammarTimes | str]


class LLGuidanceMatcher:
    """A text by a compiled grammar."""

    def __init__(self, compiled: LLMatcher, end_id: int) -> None:
        self._matcher = compiled.deep_copy()
        self._end_id = end_id
        self._mask = b""

    def fill_mask(self) -> None:
        self._mask = self._matcher.compute_bitmask()

    def list_allowed(self) -> NDArray[np.intp]:
        return list_tokens(np.frombuffer(self._mask, np.uint8), self._end_id)

    def accept(self, token: int) -> bool:
        assert self._matcher.consume_token(token), "the mask allows it"
        return bool(self._matcher.is_stopped())


def time_llguidance(table: TokenTable, grammars: Mapping[str, Constraint]) -> Times:
    """Return the times of each grammar in llguidance."""
    tokenizer, draw = table.make_tokenizer(), np.random.default_rng(0)
    return {
        name: time_grammar(lambda each=each: _compile(tokenizer, table.end_id, each), draw)  # type: ignore[misc]
        for name, each in grammars.items()
    }


def _compile(tokenizer: LLTokenizer, end_id: int, constraint: Constraint) -> Callable[[], Matcher]:
    compiled = compile_grammar(tokenizer, write_lark(constraint.kind, constraint.text))
    return lambda: LLGuidanceMatcher(compiled, end_id)


def time_xgrammar(table: TokenTable, grammars: Mapping[str, Constraint], installer: Installer) -> Times:
    """Return the times of each grammar in xgrammar, which is installed if it is not there.

    Raises InstallError, OSError, and CalledProcessError if it crashes.
    """
    installer.ensure(install_xgrammar, XGRAMMAR_VERSION)
    special = set(table.special_token_ids)
    tokens = [b"" if token in special else text for token, text in enumerate(table.tokens)]
    given = {
        "tokens": [base64.b64encode(token).decode() for token in tokens],
        "end_id": table.end_id,
        "grammars": {name: write_for_xgrammar(each) for name, each in grammars.items()},
    }
    command = [str(installer.python), "-m", "tools.bench.grammars.xgrammar_worker"]
    done = subprocess.run(
        command, input=json.dumps(given), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT
    )
    found = json.loads(done.stdout)
    return {name: times if isinstance(times, str) else GrammarTimes(*times) for name, times in found.items()}


def write_for_xgrammar(constraint: Constraint) -> tuple[str, str]:
    """Return a constraint in a form that xgrammar reads, and its text."""
    match constraint.kind:
        case "json_schema":
            schema = json.loads(constraint.text)
            schema.pop("x-guidance")
            return "json", json.dumps(schema)
        case "choice":
            return "gbnf", "root ::= " + " | ".join(map(json.dumps, json.loads(constraint.text)))
        case "regex":
            return "regex", constraint.text
    return "gbnf", ARITHMETIC
