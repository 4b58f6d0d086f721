"""Times grammars in xgrammar; runs in an environment that has it (`python -m tools.bench.grammars --xgrammar`).

Reads a JSON object from its standard input: `tokens` (Base64), `end_id`, and `grammars`, each with its form and text.
Writes one with the times of each, or why it has none.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import xgrammar  # type: ignore[import-not-found]
from numpy.typing import NDArray

from tools.bench.grammars.timing import Matcher, list_tokens, time_grammar

MAX_WHITESPACE = 2  # between the parts of JSON, so that texts do not consist of it


class XGrammarMatcher:
    """A text by a compiled grammar."""

    def __init__(self, compiled: Any, vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        self._mask = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._end_id = vocab_size - 1

    def fill_mask(self) -> None:
        self._matcher.fill_next_token_bitmask(self._mask)

    def list_allowed(self) -> NDArray[np.intp]:
        return list_tokens(self._mask.numpy().view(np.uint8)[0], self._end_id)

    def accept(self, token: int) -> bool:
        assert self._matcher.accept_token(token), "the mask allows it"
        return bool(self._matcher.is_terminated())


def compile_grammar(compiler: Any, form: str, text: str) -> Any:
    """Return a compiled grammar, given in one of the forms "json", "regex" and "gbnf"."""
    match form:
        case "json":
            return compiler.compile_json_schema(text, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
        case "regex":
            return compiler.compile_regex(text)
    return compiler.compile_grammar(text)


def main() -> None:
    given = json.load(sys.stdin)
    tokens, end_id = [base64.b64decode(token) for token in given["tokens"]], given["end_id"]
    info = xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[end_id], add_prefix_space=False
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=os.cpu_count() or 1, cache_enabled=False)
    draw = np.random.default_rng(0)
    times: dict[str, list[float] | str] = {}
    for name, (form, text) in given["grammars"].items():

        def compile(form: str = form, text: str = text) -> Callable[[], Matcher]:
            compiled = compile_grammar(compiler, form, text)
            return lambda: XGrammarMatcher(compiled, len(tokens))

        try:
            times[name] = list(time_grammar(compile, draw))
        except RuntimeError as error:  # what it does not support
            times[name] = str(error).strip().splitlines()[-1]
        print(f"{name}: {times[name]}", file=sys.stderr)
    json.dump(times, sys.stdout)


if __name__ == "__main__":
    main()
