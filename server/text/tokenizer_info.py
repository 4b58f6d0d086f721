"""The answer of GET /tokenizer_info: the configuration of a model's tokenizer, as vLLM returns it.

Reads the model's directory, and knows no request.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server.text.chat import ChatTemplate
from server.text.model_files import content_of, named_tokens, read_object

PATHS = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")  # on the machine where the tokenizer was saved
CLASS = "PreTrainedTokenizerFast"  # of a tokenizer.json that has no other


def tokenizer_info(directory: Path) -> dict[str, Any]:
    """Return what tokenizer_config.json has, tokens as texts, and the chat template. Raises SettingsError."""
    config = read_object(directory / "tokenizer_config.json")
    info = {"tokenizer_class": CLASS} | {name: _plain(value) for name, value in config.items() if name not in PATHS}
    info |= named_tokens(directory)
    template = ChatTemplate.from_directory(directory).source
    return info if template is None else info | {"chat_template": template}


def _plain(value: Any) -> Any:
    """Return a value with the text of each token that is written as an object."""
    if isinstance(value, dict):
        content = content_of(value)
        return {name: _plain(member) for name, member in value.items()} if content is None else content
    return [_plain(item) for item in value] if isinstance(value, list) else value
