"""Measures a model: perplexity on stories it has not seen, and recall by distance on records it has not seen.

    python -m server.training.evaluate server/models/tiny

Recall counts an answer as right if each of its tokens is the likeliest one given the true text before it. Both are
measured on fresh documents in the training vocabulary, and on names, objects and phrasings held out of training.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from server.training import words
from server.training.model import Llama
from server.training.packing import Mix, Rows, pack

STORIES, RECORDS = Mix(1, 0, 0), Mix(0, 1, 0)
DISTANCES = (64, 128, 256, 512, 1024, 2048)
LEXICONS = {
    "fresh documents": words.TRAIN,
    "held-out names and objects": replace(words.HELD_OUT, held_out=False),
    "held-out names, objects and phrasings": words.HELD_OUT,
}
EVALUATION_SEED = "evaluation"  # training seeds batches with other strings


def _read(model: Llama, rows: Rows) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Row by row: its index, logits (T, V) and targets (T,)."""
    device = next(model.parameters()).device
    for index, row in enumerate(rows.ids.astype("int64")):
        ids = torch.from_numpy(row).to(device)
        yield index, model(ids[None, :-1])[0].float(), ids[1:]


@torch.no_grad()
def perplexity(model: Llama, rows: Rows) -> float:
    """Per token, every token counting the same."""
    losses = [F.cross_entropy(logits, targets).item() for _, logits, targets in _read(model, rows)]
    return math.exp(sum(losses) / len(losses))


@torch.no_grad()
def recall(model: Llama, rows: Rows) -> list[tuple[int, bool]]:
    """For each answer: how far back it stood, and whether the model knew it."""
    results = []
    for index, logits, targets in _read(model, rows):
        right = logits.argmax(-1) == targets
        results += [(a.distance, bool(right[a.start - 1 : a.stop - 1].all())) for a in rows.answers[index]]
    return results


def by_distance(results: list[tuple[int, bool]]) -> dict[int, tuple[int, int]]:
    """Upper bound of the distance -> (right, asked)."""
    table: dict[int, tuple[int, int]] = {}
    for low, high in zip((0, *DISTANCES), DISTANCES, strict=False):
        within = [right for distance, right in results if low < distance <= high]
        table[high] = (sum(within), len(within))
    return table


def report(model: Llama, tokenizer: Tokenizer, rows: int) -> Iterator[str]:
    context = model.shape.positions
    for name, lexicon in LEXICONS.items():
        stories = pack(tokenizer, EVALUATION_SEED, context // 4, 4 * rows, STORIES, lexicon)
        records = pack(tokenizer, EVALUATION_SEED, context, rows, RECORDS, lexicon)
        results = recall(model, records)
        right = sum(known for _, known in results)
        yield f"{name}: perplexity of stories {perplexity(model, stories):.3f}, recall {right}/{len(results)}"
        for distance, (known, asked) in by_distance(results).items():
            yield f"  up to {distance:4d} tokens back: {known:4d}/{asked:<4d} {known / max(1, asked):4.0%}"


def main() -> None:
    from server.training.export import load_exported  # export.py is not needed to measure during training

    parser = argparse.ArgumentParser(description="Measure an exported model.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=16, help="rows of records to read (default 16)")
    arguments = parser.parse_args()
    model, tokenizer = load_exported(arguments.directory)
    for line in report(model, tokenizer, arguments.rows):
        print(line, flush=True)


if __name__ == "__main__":
    main()
