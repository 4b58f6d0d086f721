"""Judges texts by a grammar as the engine gets it: whether they satisfy it, in the tokens of a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from server.grammar.matcher import TokenTable, compile_grammar
from server.text.encoder import Encoder
from server.text.vocabulary import Vocabulary
from tests.models.random_models import byte_tokenizer


class GrammarJudge:
    """Says which texts a grammar accepts."""

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        """Judge with this vocabulary; None: with one of single bytes."""
        table = TokenTable(vocabulary or Encoder(byte_tokenizer(258)).vocabulary)
        self._tokenizer = table.make_tokenizer()
        self._ids = {table.tokens[token]: token for token in range(2, table.end_id)}

    def accepts(self, grammar: str | None, text: str | bytes) -> bool:
        """Return whether a text, spelled byte by byte, satisfies the grammar. Raises GrammarError for a wrong one."""
        data = text.encode() if isinstance(text, str) else text
        return self.accepts_tokens(grammar, [self._ids[bytes([byte])] for byte in data])

    def accepts_tokens(self, grammar: str | None, tokens: Sequence[int]) -> bool:
        """Return whether the text of these tokens satisfies the grammar."""
        assert grammar is not None, "any text would do"
        matcher = compile_grammar(self._tokenizer, grammar)
        return matcher.try_consume_tokens(list(tokens)) == len(tokens) and bool(matcher.is_accepting())
