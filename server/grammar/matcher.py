"""Compiles grammars for a model's tokens with llguidance, within limits, and checks them before they are used.

A compiled grammar (`LLMatcher`) says which tokens may come next. The same code runs in the process that checks the
grammars of clients and in the engine, which compiles those that passed: what compiles in the one compiles in the other.
Knows neither requests nor processes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from server.grammar.constraint import ConstraintKind
from server.grammar.lark import write_lark
from server.text.errors import MAX_REASON_LENGTH, GrammarError
from server.text.vocabulary import Vocabulary

# Limits of what a grammar may take, well above what schemas in use need. The most that a mask took at these limits, of
# ambiguous grammars with a vocabulary of 152,000 tokens: 21 ms; at twice as many items: 220 ms. A state of the lexer
# takes 1 to 2 KiB, so the lexer of one grammar, which all its texts share, takes at most 40 MiB.
MAX_ITEMS = 10_000  # of the parser, for one mask
MAX_LEXER_STATES = 20_000
MAX_STEP_FUEL = 100_000  # of the lexer, for one mask: about 7 ms
MAX_COMPILE_FUEL = 1_000_000  # of the lexer, to compile a grammar
MAX_GRAMMAR_SIZE = 200_000  # symbols in rules
END_OF_GRAMMAR = b"<|end of grammar|>"
# Parts of llguidance's errors that say nothing to a client: positions in the grammar that was written for llguidance
_POSITION = re.compile(r"^(?:at )?\d+\(\d+\): ")
_COMPILING = re.compile(r'^(failed to compile JSON schema|failed to parse "%json"): ')
_JSON_POSITION = re.compile(r" at line \d+ column \d+$")
_TOO_MUCH_WORK = re.compile(r"^(?:parser|lexer) error: (too many [^;<(]*)", re.IGNORECASE)
_NO_TEXT = "no text of the model's tokens satisfies it"
_MESSAGES = {  # for a client, by the beginning of llguidance's
    "recursion limit exceeded": "the schema is nested too deeply; move parts of it into $defs",
    "NoExtension": _NO_TEXT,
    "oneOf constraints": "oneOf is not supported unless no value can satisfy two of its schemas; use anyOf",
    "Resource ": "$ref is only supported within the schema: move what it refers to into $defs",
}


def make_limits() -> LLParserLimits:
    """Return llguidance's limits of compiling a grammar and computing a mask."""
    return LLParserLimits(
        step_max_items=MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        step_lexer_fuel=MAX_STEP_FUEL,
        initial_lexer_fuel=MAX_COMPILE_FUEL,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )


class TokenTable:
    """A model's tokens as llguidance reads them: the bytes of each id, and the ids without text.

    One more id stands for the end of the grammar. It is not a token of the model. Tokens that end texts are allowed
    where it is allowed, but which tokens these are depends on the request.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.end_id = self.eos_token_id = vocabulary.num_ids
        self.tokens = [*(vocabulary.token_bytes(token) for token in range(self.end_id)), END_OF_GRAMMAR]
        self.special_token_ids = [*vocabulary.special_ids, self.end_id]
        self._tokenizer: LLTokenizer | None = None

    def make_tokenizer(self) -> LLTokenizer:
        """Return llguidance's own table; making it takes about a third of a second for 150,000 tokens."""
        self._tokenizer = LLTokenizer(self)  # type: ignore[arg-type]  # it takes every object with these attributes
        return self._tokenizer

    def __call__(self, text: bytes | str) -> Sequence[int]:
        """Return tokens of a text. llguidance calls this only for grammars that switch off OPTIONS (`lark.py`)."""
        assert self._tokenizer is not None
        return self._tokenizer.greedy_tokenize(text if isinstance(text, str) else text.decode(errors="replace"))


def compile_grammar(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    """Return a grammar, compiled and at its start. Raises GrammarError if it is wrong, or beyond the limits."""
    matcher = LLMatcher(tokenizer, lark, log_level=0, limits=make_limits())
    if matcher.is_error():
        raise GrammarError(describe_error(matcher))
    return matcher


def may_be_lexer_error(matcher: LLMatcher) -> bool:
    """Return whether a matcher has an error that may be that of its lexer, which it shares with its copies."""
    return matcher.is_error() and not matcher.get_error().lower().startswith("parser error: ")


def describe_error(matcher: LLMatcher) -> str:
    """Return the message for a client: llguidance's error without the grammar that it quotes, in the client's terms."""
    lines = matcher.get_error().splitlines()
    message = _COMPILING.sub("", _POSITION.sub("", lines[0] if lines else "unknown error"))
    message = _JSON_POSITION.sub("", message)
    if (work := _TOO_MUCH_WORK.match(message)) is not None:
        return f"it takes too much work for one token ({work[1].strip().lower()}); send a simpler one"
    if message.endswith("regex parse error:"):
        return _describe_regex_error(lines)
    if message.startswith("Unknown format: "):
        return f"format {message.removeprefix('Unknown format: ')!r} is not supported; leave it out or use pattern"
    for beginning, own_message in _MESSAGES.items():
        if message.startswith(beginning):
            return own_message
    message = message.replace("Unimplemented keys:", "the schema has keywords that are not supported:")
    return message if len(message) <= MAX_REASON_LENGTH else f"{message[:MAX_REASON_LENGTH]}..."


def _describe_regex_error(lines: Sequence[str]) -> str:
    reason = next((line for line in lines if line.startswith("error: ")), "error: it cannot be parsed")
    if reason == "error: decimal literal invalid":  # that of a schema's maxLength, too
        return "a length or a number of repetitions is too large"
    return f"a regular expression is not supported: {reason.removeprefix('error: ')}"


class GrammarChecker:
    """Checks the constraints of clients for one model, and writes them as Lark grammars."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = TokenTable(vocabulary).make_tokenizer()

    def check(self, kind: ConstraintKind, text: str) -> str:
        """Return the Lark grammar of a constraint if it compiles and allows a first token.

        Raises GrammarError if not, or if the grammar is beyond the limits. These do not bound time and memory.
        """
        lark = write_lark(kind, text)
        matcher = compile_grammar(self._tokenizer, lark)
        allowed = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(describe_error(matcher))
        if not any(allowed):
            raise GrammarError(_NO_TEXT)
        return lark
