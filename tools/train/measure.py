"""Measures a model during training: perplexity on unseen stories, and recall of held-out names by distance.

Whole rows go through the model at once, without a cache. `kvmux evaluate` (server/evaluation) measures served models
under each cache strategy.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train.corpus.packing import PackedRows
from tools.train.model import Llama

DISTANCES = (64, 128, 256, 512, 1024, 2048)


def _forward_rows(model: Llama, rows: PackedRows) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield for each row its index, logits (T, V) and targets (T,)."""
    device = next(model.parameters()).device
    for index, row in enumerate(rows.ids.astype("int64")):
        ids = torch.from_numpy(row).to(device)
        yield index, model(ids[None, :-1])[0].float(), ids[1:]


@torch.no_grad()
def compute_perplexity(model: Llama, rows: PackedRows) -> float:
    """Return the perplexity per token, without the loss weights."""
    losses = [F.cross_entropy(logits, targets).item() for _, logits, targets in _forward_rows(model, rows)]
    return math.exp(sum(losses) / len(losses))


@torch.no_grad()
def compute_recall(model: Llama, rows: PackedRows) -> list[tuple[int, bool]]:
    """Return for each answer its distance in tokens, and whether the model predicts all of its tokens."""
    results = []
    for index, logits, targets in _forward_rows(model, rows):
        right = logits.argmax(-1) == targets
        results += [(a.distance, bool(right[a.start - 1 : a.stop - 1].all())) for a in rows.answers[index]]
    return results


def group_by_distance(results: list[tuple[int, bool]]) -> dict[int, tuple[int, int]]:
    """Return the numbers of right answers and of all answers, by the upper bound of the distance."""
    table: dict[int, tuple[int, int]] = {}
    for low, high in zip((0, *DISTANCES), DISTANCES, strict=False):
        within = [right for distance, right in results if low < distance <= high]
        table[high] = (sum(within), len(within))
    return table
