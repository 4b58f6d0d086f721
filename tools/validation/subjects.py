"""Makes the models of a validation, each with a text to predict: stories that the embedded one was not trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from server.evaluation.corpus.packing import EVALUATION_SEED
from server.evaluation.documents import find_special_tokens, make_stories
from server.models.files.directory import EMBEDDED
from tools.bench.table.models import QWEN, make_model


@dataclass(frozen=True)
class Subject:
    """A model to validate, and its text, which has one window more than is predicted."""

    directory: Path
    pre_tokenizer: str  # llama.cpp's name for how its tokenizer splits texts
    text: str
    window: int  # tokens
    num_windows: int

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids of the tokens that end a text."""
        found = self._config()["eos_token_id"]
        return frozenset(found if isinstance(found, list) else [found])

    @property
    def bos_id(self) -> int:
        """The id of the token with which a text begins if the tokenizer adds one."""
        return int(self._config()["bos_token_id"])

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.directory / "config.json").read_text())
        return config


SUBJECTS = ("tiny", QWEN.name)


def make_subject(name: str, models: Path, show_status: Callable[[str], None]) -> Subject:
    """Return a model of SUBJECTS with stories as its text. The one with random weights is made in `models` if needed.

    Raises OSError.
    """
    if name == QWEN.name:
        directory, pre_tokenizer, window, num_windows = make_model(QWEN, models, show_status), "gpt-2", 512, 4
    else:
        directory, pre_tokenizer, window, num_windows = EMBEDDED[name], "smollm", 1024, 4
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    marks = find_special_tokens(tokenizer, frozenset(), tokenizer.get_vocab_size())
    stories = make_stories(tokenizer, marks, window, num_windows + 1, EVALUATION_SEED)
    text = "\n".join(tokenizer.decode(each.ids) for each in stories)
    return Subject(directory, pre_tokenizer, text, window, num_windows)
