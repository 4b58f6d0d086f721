"""Adds the tokens to a tokenizer that only the files beside tokenizer.json have, and marks special ones.

Fine-tunes name tokens in tokenizer_config.json, and old models in added_tokens.json, without writing them into
tokenizer.json. transformers adds them, in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from config.errors import SettingsError
from config.wording import format_value
from server.text.model_files import SPECIAL_TOKEN_NAMES, get_token_text, read_json_object

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_tokens(backend: tokenizers.Tokenizer, directory: Path) -> None:
    """Add what the files of a model's directory name.

    Raises SettingsError for a file of an unexpected form, and for a token that would get another id than it has there.
    """
    file = directory / "tokenizer_config.json"
    config = read_json_object(file)
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict) or not all(isinstance(token, dict) for token in decoder.values()):
        raise SettingsError(f"model: {file}: added_tokens_decoder should have an object for each id")
    named, older_map = _list_special_tokens(config, file), directory / "special_tokens_map.json"
    older_named = _list_special_tokens(read_json_object(older_map), older_map)
    if decoder:
        _add_listed(backend, [(_read_id(id, file), token) for id, token in decoder.items()], file)
        # As the other file takes precedence, tokens of the older one that the tokenizer does not have are not added
        older_named = [each for each in older_named if backend.token_to_id(each) is not None]
    else:  # old models
        older = directory / "added_tokens.json"
        ids, special = read_json_object(older), {*named, *older_named}
        _add_listed(
            backend,
            [(_read_id(id, older), {"content": content, "special": content in special}) for content, id in ids.items()],
            older,
        )
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    _mark_special(backend, [*named, *older_named])


def _add_listed(backend: tokenizers.Tokenizer, listed: Sequence[tuple[int, Mapping[str, Any]]], file: Path) -> None:
    """Add the tokens of a list; its flags take precedence. Raises SettingsError if one gets another id."""
    tokens = {
        content: (id, {flag: bool(token[flag]) for flag in FLAGS if flag in token})
        for id, token in sorted(listed, key=lambda each: each[0])
        if (content := get_token_text(token))
    }
    new = {content: id for content, (id, _) in tokens.items() if backend.token_to_id(content) is None}
    _add_changed(backend, {content: flags for content, (_, flags) in tokens.items()})
    for content, id in new.items():
        if (got := backend.token_to_id(content)) != id:
            raise SettingsError(
                f"model: {file}: the token {format_value(content)} should have the id {id} and would get {got}: this "
                "file and tokenizer.json do not belong together"
            )


def _mark_special(backend: tokenizers.Tokenizer, contents: Iterable[str]) -> None:
    """Mark tokens as special, which keep their other flags; those that the tokenizer would split are added."""
    known = _read_flags(backend)
    _add_changed(backend, {content: known.get(content, {}) | {"special": True} for content in contents})


def _add_changed(backend: tokenizers.Tokenizer, flags: Mapping[str, Mapping[str, bool]]) -> None:
    """Add tokens with these flags, but for those that the tokenizer has with the same ones.

    In one call, as each call takes time for all tokens of the tokenizer, of which Gemma has thousands.
    """
    known = _read_flags(backend)
    tokens = [tokenizers.AddedToken(content, **each) for content, each in flags.items()]
    backend.add_tokens([token for token in tokens if known.get(token.content) != _get_flags(token)])


def _read_flags(backend: tokenizers.Tokenizer) -> dict[str, dict[str, bool]]:
    """Return the flags of the tokens that the tokenizer does not split, by their texts."""
    return {token.content: _get_flags(token) for token in backend.get_added_tokens_decoder().values()}


def _get_flags(token: tokenizers.AddedToken) -> dict[str, bool]:
    return {flag: getattr(token, flag) for flag in FLAGS}


def _read_id(id: Any, file: Path) -> int:
    try:
        return int(id)
    except (TypeError, ValueError):
        raise SettingsError(f"model: {file}: {format_value(id)} should be the id of a token") from None


def _list_special_tokens(config: Mapping[str, Any], file: Path) -> list[str]:
    """Return the texts of the special tokens that a file names. Raises SettingsError for an unexpected form."""
    further = config.get("additional_special_tokens") or []
    if not isinstance(further, list):
        raise SettingsError(f"model: {file}: additional_special_tokens should be a list of tokens")
    named = [*(config.get(name) for name in SPECIAL_TOKEN_NAMES), *further]
    return [content for token in named if (content := get_token_text(token)) is not None]
