"""Reads documents under several strategies side by side, and counts how far each is from exact caching.

All strategies read the same tokens in the same step, as rows of one batch, the way the server runs them; so no logits
are kept longer than a step. Knows documents and caches; not where either comes from, nor how results are shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cache_strategies.base import KVCache, Row, Seat
from config.errors import SettingsError
from server.engine.batch import Batch, Work
from server.evaluation.documents import Document
from server.models.base import Model


@dataclass
class Fidelity:
    """Sums over the tokens that one strategy has read."""

    tokens: int = 0
    surprise: float = 0.0  # -log p of the true tokens, nats
    agreed: int = 0  # tokens at which the likeliest one is that of exact caching
    divergence: float = 0.0  # KL(exact || this), nats
    recalled: list[tuple[int, bool]] = field(default_factory=list)  # per answer: tokens back, and was it known?

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.surprise / self.tokens)
        except OverflowError:
            return math.inf

    @property
    def agreement(self) -> float:
        """Share of the tokens."""
        return self.agreed / self.tokens

    @property
    def kl(self) -> float:
        """Mean over the tokens, nats."""
        return self.divergence / self.tokens

    def recall(self, least: int, most: int) -> tuple[int, int]:
        """Answers known, and answers asked, whose nearest mention stood `least` to `most` tokens back."""
        known = [right for distance, right in self.recalled if least <= distance <= most]
        return sum(known), len(known)


@torch.inference_mode()
def compare(
    model: Model,
    caches: Sequence[KVCache],
    documents: Sequence[Document],
    *,
    row_tokens: int,
    read: Callable[[int], object] = lambda tokens: None,
) -> list[Fidelity]:
    """What each cache makes of the documents; caches[0] is the exact one that the others are held against.

    `row_tokens`: of a document that enter in a step, at most the max_row of every cache; with 1 they enter as in
    decoding. `read` is told the tokens of each step. Raises SettingsError if there is no room for a document under all,
    before it reads any, or if the model computes no numbers.
    """
    _check_room(caches, max(documents, key=lambda document: len(document.ids)))
    results = [Fidelity() for _ in caches]
    for document in documents:
        known = torch.zeros(len(caches), len(document.ids), dtype=torch.bool)  # was the token the likeliest one?
        with _seats(caches, document) as seats:
            for first in range(0, len(document.ids) - 1, row_tokens):
                tokens = document.ids[first : first + row_tokens + 1]  # one more than enter: the last target
                logits = _step(model, caches, seats, tokens[:-1])
                targets = torch.tensor(tokens[1:], device=logits.device)
                known[:, first + 1 : first + len(tokens)] = count(results, logits, targets)
                read(len(targets))
        for result, tokens_known in zip(results, known.tolist(), strict=True):
            result.recalled += [(a.distance, all(tokens_known[a.start : a.stop])) for a in document.answers]
    return results


def _step(model: Model, caches: Sequence[KVCache], seats: Sequence[Seat], tokens: Sequence[int]) -> Tensor:
    """The tokens enter every cache, in one batch: logits [S, n, V]."""
    n = len(tokens)
    work = [Work(c, Row(_grown(c, seat, n), n), tokens, logits=n) for c, seat in zip(caches, seats, strict=True)]
    batch = Batch(work, model.device)
    assert batch.order == list(range(len(work))), "one row a strategy, so there is nothing to order"
    logits = model.forward(batch.ids, batch).float().view(len(work), n, -1)
    batch.commit()
    if not logits.isfinite().all():
        raise SettingsError("the model's logits are not finite: try --dtype float32, or look at its weights")
    return logits


def count(results: Sequence[Fidelity], logits: Tensor, targets: Tensor) -> Tensor:
    """Adds to each strategy's sums; [S, n], where the target was the likeliest token.

    logits [S, n, V], those of exact caching first; targets [n].
    """
    logp = logits.log_softmax(-1)
    surprise = -logp.gather(-1, targets.expand(len(logits), -1).unsqueeze(-1)).squeeze(-1)  # [S, n]
    best = logits.argmax(-1)
    exact = logp[0].exp()
    for i, result in enumerate(results):
        result.tokens += len(targets)
        result.surprise += float(surprise[i].cpu().double().sum())
        result.agreed += int((best[i] == best[0]).sum())
        result.divergence += float((exact * (logp[0] - logp[i])).sum(-1).cpu().double().sum())
    return best == targets


@contextmanager
def _seats(caches: Sequence[KVCache], document: Document) -> Iterator[list[Seat]]:
    """A seat in each cache for a text that has to be computed from its first token; afterwards they are empty again."""
    with ExitStack() as stack:
        seats = []
        for cache in caches:
            stack.callback(_empty, cache)
            seat = cache.open(document.ids[:-1], max_cached=0)  # the last one never enters
            if seat is None:
                raise _no_room(cache)
            stack.callback(cache.close, seat)
            seats.append(seat)
        yield seats


def _empty(cache: KVCache) -> None:
    """Gives back what it keeps for later, or the next document might not find a run of pages."""
    cache.reclaim(cache.idle_pages())


def _check_room(caches: Sequence[KVCache], longest: Document) -> None:
    tokens = len(longest.ids) - 1
    with _seats(caches, longest) as seats:
        for cache, seat in zip(caches, seats, strict=True):
            _grown(cache, seat, min(tokens, cache.contract.max_row or tokens))


def _grown(cache: KVCache, seat: Seat, more: int) -> Seat:
    if not cache.grow(seat, more):
        raise _no_room(cache)
    return seat


def _no_room(cache: KVCache) -> SettingsError:
    return SettingsError(f"no room for a document under {cache.name}: raise --kv-memory or lower --length")
