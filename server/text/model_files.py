"""Reads the JSON files of a model's directory that describe its special tokens, as transformers does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from config.errors import SettingsError
from server.text.errors import MAX_REASON_LENGTH, is_tokenizers_error

OLD_FILES = ("tokenizer.model", "vocab.json", "spiece.model")  # of tokenizers without a tokenizer.json
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if there is no file. Raises SettingsError if it holds anything else."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SettingsError(f"model: cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"model: {file} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"model: {file} should be a JSON object")
    return values


@contextmanager
def convert_library_errors(message: str) -> Iterator[None]:
    """Turn an error of the tokenizers library into a SettingsError: `message`, then the library's text in one line."""
    try:
        yield
    except (SettingsError, OSError, MemoryError):
        raise
    except BaseException as error:
        if not is_tokenizers_error(error):
            raise
        reason = " ".join(str(error).split())[:MAX_REASON_LENGTH] or type(error).__name__
        raise SettingsError(f"{message}: {reason}") from None


def get_token_text(token: Any) -> str | None:
    """Return the text of a token that is given as a string or as {"content": ...}; None for anything else."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Return the texts of the special tokens by role, such as {"bos_token": "<s>"}.

    Raises SettingsError for files that are not JSON objects.
    """
    config = read_json_object(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # old models: special_tokens_map.json takes precedence
        config |= read_json_object(directory / "special_tokens_map.json")
    return {name: content for name in SPECIAL_TOKEN_NAMES if (content := get_token_text(config.get(name))) is not None}


def explain_missing_tokenizer(directory: Path) -> str:
    """Return the rest of a sentence on a directory without tokenizer.json: how to get one."""
    if any((directory / name).is_file() for name in OLD_FILES):
        convert = f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
        return f", but a tokenizer in an older form: transformers writes one with {convert}"
    return "; is it the directory of a model?"
