"""What the JSON files of a model's directory say about its tokens, as transformers reads them.

Knows neither the tokenizer nor templates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from config.errors import SettingsError

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_object(file: Path) -> dict[str, Any]:
    """A file's JSON object; empty where there is no such file. Raises SettingsError."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SettingsError(f"model: {file} is no JSON: {error}") from None
    return values if isinstance(values, dict) else {}


def content_of(token: Any) -> str | None:
    """A token is written as a string or as {"content": ...}."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def named_tokens(directory: Path) -> dict[str, str]:
    """The tokens that have a part to play, such as {"bos_token": "<s>"}. Raises SettingsError."""
    config = read_object(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # of an older time, when the other file had the last word
        config |= read_object(directory / "special_tokens_map.json")
    return {name: content for name in NAMES if (content := content_of(config.get(name))) is not None}
