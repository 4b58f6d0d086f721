"""Runs documents under several strategies at once, and measures how far each is from exact caching.

All strategies compute the same tokens in the same step, as rows of one batch, as in the server; so no logits are kept
longer than a step. Documents come from documents.py, and report.py shows the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cache_strategies.base import KVSequence
from config.errors import SettingsError
from server.engine.batch import Batch, RowInput
from server.engine.instance import Instance
from server.engine.scheduling.scheduler import has_room, limit_row
from server.evaluation.documents import Document
from server.models.base import Model


@dataclass
class Fidelity:
    """The agreement of one strategy with exact caching, as sums over the tokens of some documents."""

    num_tokens: int = 0
    total_nll: float = 0.0  # sum of the tokens' negative log-likelihoods under this strategy, nats
    num_agreed: int = 0  # number of tokens at which the likeliest token is the same as with exact caching
    kls: list[float] = field(default_factory=list)  # of each token, the divergence KL(exact || this strategy), nats
    # For each answer: (tokens back to its latest mention, whether all tokens of the answer were predicted).
    answer_recalls: list[tuple[int, bool]] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self._mean(self.total_nll))
        except OverflowError:
            return math.inf

    @property
    def agreement(self) -> float:
        """The share of positions at which the likeliest token is the same as with exact caching."""
        return self._mean(self.num_agreed)

    @property
    def kl(self) -> float:
        """The mean KL divergence from exact caching over the tokens, nats."""
        return self._mean(sum(self.kls))

    def kl_quantile(self, share: float) -> float:
        """Return the KL divergence, nats, that this share of the tokens does not exceed; NaN if there are no tokens."""
        return float(np.quantile(self.kls, share)) if self.kls else math.nan

    def _mean(self, total: float) -> float:
        return total / self.num_tokens if self.num_tokens else math.nan

    def recall(self, nearest: int, farthest: int) -> tuple[int, int]:
        """Return the numbers of (right, all) answers whose latest mention is `nearest` to `farthest` tokens back.

        Both distances are inclusive.
        """
        known = [right for distance, right in self.answer_recalls if nearest <= distance <= farthest]
        return sum(known), len(known)


@torch.inference_mode()
def compare(
    model: Model,
    instances: Sequence[Instance],
    documents: Sequence[Document],
    *,
    row_tokens: int,
    last: int | None = None,
    on_tokens_read: Callable[[int], object] = lambda tokens: None,
) -> list[Fidelity]:
    """Run the documents under each instance, and return the fidelity of each one to instances[0].

    A step computes `row_tokens` tokens of a document, or as few as the `stop` of a sequence says; 1 is as in decoding.
    Of each document the `last` tokens count, or all of them. `on_tokens_read` is called after each step with its number
    of tokens. Raises SettingsError if there is no room for the longest document under every instance, before any is
    computed, or if logits are NaN or infinite.
    """
    if documents:
        _check_room(instances, max(documents, key=lambda document: len(document.ids)))
    results = [Fidelity() for _ in instances]
    for document in documents:
        # [strategy, position in the document]: whether the strategy predicted the token
        known = torch.zeros(len(instances), len(document.ids), dtype=torch.bool)
        *inputs, _ = document.ids  # the last token is only predicted
        num_skipped = 0 if last is None else max(0, len(inputs) - last)
        with _open_sequences(instances, document) as sequences:
            first = 0
            while first < len(inputs):
                n = min(_limit_row(*each, row_tokens) for each in zip(instances, sequences, strict=True))
                tokens = inputs[first : first + n]
                counted = range(max(first, num_skipped), first + len(tokens))
                logits = _run_step(model, instances, sequences, tokens, num_logits=len(counted))
                if counted:
                    predicted = slice(counted.start + 1, counted.stop + 1)
                    targets = torch.tensor(document.ids[predicted], device=logits.device)
                    known[:, predicted] = update_fidelities(results, logits, targets)
                on_tokens_read(len(tokens))
                first += len(tokens)
        for result, tokens_known in zip(results, known.tolist(), strict=True):
            result.answer_recalls += [(a.distance, all(tokens_known[a.start : a.stop])) for a in document.answers]
    return results


def _run_step(
    model: Model,
    instances: Sequence[Instance],
    sequences: Sequence[KVSequence],
    tokens: Sequence[int],
    *,
    num_logits: int,
) -> Tensor:
    """Compute the `tokens` under each of S instances in one batch; return the last n = `num_logits` logits, [S, n, V].

    Raises SettingsError if the memory is full or logits are NaN or infinite, StrategyError if a strategy fails.
    """
    row_inputs = [
        RowInput(each, _reserve(each, sequence, len(tokens)), sequence.length, tokens, num_logits=num_logits)
        for each, sequence in zip(instances, sequences, strict=True)
    ]
    batch = Batch(row_inputs, model.device)
    assert batch.row_order == list(range(len(row_inputs))), "each strategy has one row, so the order is unchanged"
    logits: Tensor = model.forward(batch.input_ids, batch).float().unflatten(0, (len(row_inputs), num_logits))
    for error in batch.commit().values():
        raise error
    if not logits.isfinite().all():
        raise SettingsError("the model's logits are not finite: try --dtype float32, or check its weights")
    return logits


def update_fidelities(results: Sequence[Fidelity], logits: Tensor, targets: Tensor) -> Tensor:
    """Add n tokens to the sums in `results`; return bool [S, n]: whether the target was a strategy's likeliest token.

    `logits` [S, n, V] are those of S strategies, exact caching first; `targets` [n] are the tokens that follow.
    """
    logp = logits.log_softmax(-1)
    nll = -logp.gather(-1, targets.expand(len(logits), -1).unsqueeze(-1)).squeeze(-1)  # [S, n]
    best = logits.argmax(-1)
    exact = logp[0].exp()
    for i, result in enumerate(results):
        result.num_tokens += len(targets)
        result.total_nll += float(nll[i].cpu().double().sum())
        result.num_agreed += int((best[i] == best[0]).sum())
        result.kls += (exact * (logp[0] - logp[i])).sum(-1).tolist()
    return best == targets


@contextmanager
def _open_sequences(instances: Sequence[Instance], document: Document) -> Iterator[list[KVSequence]]:
    """Open a sequence in each instance for a document, without cached prefixes; at exit, empty the instances again.

    Raises SettingsError if there is no room for the document.
    """
    with ExitStack() as stack:
        sequences = []
        for instance in instances:
            stack.callback(_evict_idle, instance)
            opened = instance.open(document.ids[:-1], max_cached=0)  # the last token is only predicted, not an input
            if opened is None:
                raise _no_room_error(instance)
            stack.callback(instance.close, opened)
            sequences.append(opened)
        yield sequences


def _evict_idle(instance: Instance) -> None:
    """Free an instance's idle blocks, so that they are in the next document's way nowhere."""
    instance.evict(instance.idle_bytes)


def _check_room(instances: Sequence[Instance], longest: Document) -> None:
    tokens = len(longest.ids) - 1
    with _open_sequences(instances, longest) as sequences:
        for instance, sequence in zip(instances, sequences, strict=True):
            _reserve(instance, sequence, _limit_row(instance, sequence, tokens))


def _limit_row(instance: Instance, sequence: KVSequence, num_tokens: int) -> int:
    """Return how many of `num_tokens` tokens the next row of a sequence may have."""
    with instance.guard["schedule"]:
        return limit_row(sequence, sequence.length, num_tokens)


def _reserve(instance: Instance, sequence: KVSequence, more: int) -> KVSequence:
    with instance.guard["schedule"]:
        is_reserved = has_room(sequence, sequence.length, more)
    if not is_reserved:
        raise _no_room_error(instance)
    return sequence


def _no_room_error(instance: Instance) -> SettingsError:
    return SettingsError(f"no room for a document under {instance.name}: raise --kv-memory or lower --length")
