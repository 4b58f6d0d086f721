"""What transformers computes from a GGUF file in float32: the reference of the tests with real models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

CHUNK = 1024  # tokens of a prompt computed at once, so that the attention of long prompts fits the memory


class Reference:
    """A GGUF file as transformers computes it."""

    def __init__(self, file: Path) -> None:
        options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32, "attn_implementation": "sdpa"}
        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(file.parent, **options).eval()

    @torch.inference_mode()
    def compute_log_probs(self, tokens: Sequence[int], last: int | None = None) -> torch.Tensor:
        """Return the log-probabilities [last, V] after each of the last tokens but the very last; None: after all."""
        keep = len(tokens) - 1 if last is None else last
        cache, found = DynamicCache(config=self._model.config), []
        ids = torch.tensor([tokens[:-1]])
        for begin in range(0, ids.shape[1], CHUNK):
            chunk = ids[:, begin : begin + CHUNK]
            wanted = min(chunk.shape[1], max(0, begin + chunk.shape[1] - (ids.shape[1] - keep)))
            # logits_to_keep: all logits of a long prompt would take gigabytes with 262,144 tokens; 0 would keep all
            logits = self._model(chunk, cache=cache, logits_to_keep=max(1, wanted)).logits[0]
            if wanted:
                found.append(logits.double().log_softmax(-1).float())
        return torch.cat(found)

    @torch.inference_mode()
    def continue_greedily(self, tokens: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """Return the likeliest continuation by `count` tokens, and by how many nats each led before the second."""
        cache, ids = DynamicCache(config=self._model.config), torch.tensor([list(tokens)])
        text: list[int] = []
        margins: list[float] = []
        while len(text) < count:
            log_probs = self._model(ids, cache=cache, logits_to_keep=1).logits[0, -1].log_softmax(-1)
            best = log_probs.topk(2)
            text.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            ids = torch.tensor([[text[-1]]])
        return text, margins
