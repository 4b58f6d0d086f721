"""Finds tokens of a model's tokenizer that its embedding has no row for. Knows no tokenizer."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from server.models.config_file import read_json
from server.text.model_files import get_token_text

log = logging.getLogger(__name__)


def warn_tokens_without_rows(directory: Path, vocab_size: int) -> None:
    """Log a warning if files add tokens whose ids are not below `vocab_size`: texts with them are refused."""
    unknown = {content: id for content, id in _iter_added_tokens(directory) if id >= vocab_size}
    if unknown:
        content, id = min(unknown.items(), key=lambda each: each[1])
        further = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        log.warning(
            "%s: the tokenizer has the token %s with the id %d%s, but the model's embedding has %d rows: "
            "texts with such a token are refused",
            directory,
            json.dumps(content)[:60],
            id,
            further,
            vocab_size,
        )


def _iter_added_tokens(directory: Path) -> Iterator[tuple[str, int]]:
    """Yield the text and the id of each token that tokenizer_config.json adds, or in old models added_tokens.json.

    Whoever loads the tokenizer says what is wrong in them.
    """
    files = directory / "tokenizer_config.json", directory / "added_tokens.json"
    config, older = (read_json(file) if file.is_file() else {} for file in files)
    decoder = config.get("added_tokens_decoder")
    named = decoder.items() if isinstance(decoder, dict) else ()
    listed = [(get_token_text(token), int(id)) for id, token in named if id.isdecimal()]
    for content, id in listed or older.items():
        if isinstance(content, str) and type(id) is int:
            yield content, id
