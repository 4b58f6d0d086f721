"""What each scorer computes, written down once more: in float64, one head, query and key after the other.

Each function returns the scores [H][S], and how far they are from a place where they jump (a tie of ranks, a
threshold), where float32 may well differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cache_strategies.scorers.base import Past
from plugin_kit.scorers.texts import ScoredText, rotate

Scores = tuple[list[list[float]], float]
Formula = Callable[[ScoredText, Past, Any, dict[Any, Any]], Scores]
INF = math.inf


def keys_of(text: ScoredText, past: Past, head: int) -> list[Tensor]:
    return [text.keys[p, head].double() for p in past.positions[head].tolist()]


def values_of(text: ScoredText, past: Past, head: int) -> list[Tensor]:
    return [text.values[p, head].double() for p in past.positions[head].tolist()]


def softmax(logits: list[float], sink: float | None = None) -> list[float]:
    top = max([*logits, -INF if sink is None else sink])
    if top == -INF:
        return [0.0] * len(logits)
    powers = [math.exp(x - top) for x in logits]
    total = sum(powers) + (0.0 if sink is None else math.exp(sink - top))
    return [x / total for x in powers]


def logits_of(text: ScoredText, past: Past, query: int, query_head: int) -> list[float]:
    """One query's scores of the kept keys before the softmax."""
    spec = text.spec
    head = query_head // (spec.num_q_heads // spec.num_kv_heads)
    result = []
    for position, key in zip(past.positions[head].tolist(), keys_of(text, past, head), strict=True):
        x = float(text.queries[query, query_head].double() @ key) * spec.scale
        if spec.softcap is not None:
            x = spec.softcap * math.tanh(x / spec.softcap)
        seen = position <= query and (spec.window is None or position > query - spec.window)
        result.append(x if seen else -INF)
    return result


def weights_of(text: ScoredText, past: Past, query: int, query_head: int) -> list[float]:
    sinks = text.spec.sink_logits
    sink = None if sinks is None else float(sinks[query_head])
    return softmax(logits_of(text, past, query, query_head), sink)


def group_of(text: ScoredText, head: int) -> range:
    size = text.spec.num_q_heads // text.spec.num_kv_heads
    return range(head * size, (head + 1) * size)


def mean(rows: list[list[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def heads_of(text: ScoredText) -> range:
    return range(text.spec.num_kv_heads)


# ---------------------------------------------------------------- of keys and values
def keydiff(text: ScoredText, past: Past, options: Any, history: dict[Any, Any]) -> Scores:
    scores = []
    for head in heads_of(text):
        keys = keys_of(text, past, head)
        anchor = torch.stack([key / key.norm() for key in keys]).mean(0)
        scores.append([-float(key @ anchor / (key.norm() * anchor.norm())) for key in keys])
    return scores, INF


def knorm(text: ScoredText, past: Past, options: Any, history: dict[Any, Any]) -> Scores:
    return [[-math.sqrt(float(key @ key)) for key in keys_of(text, past, head)] for head in heads_of(text)], INF


def lagkv(text: ScoredText, past: Past, options: Any, history: dict[Any, Any]) -> Scores:
    lag, sinks, S = options.lag_size, options.sinks, past.positions.shape[1]
    if sinks + 2 * lag > S:
        return [[INF if i < sinks else i / S for i in range(S)] for _ in heads_of(text)], INF
    scores, margin = [], INF
    for head in heads_of(text):
        row = [INF] * S
        tensors = (keys_of(text, past, head), values_of(text, past, head))
        for start in range(sinks, S - 2 * lag + 1, lag):
            spread = [0.0] * lag
            for x in tensors:
                reference = torch.stack(x[start + lag : start + 2 * lag])
                low, high = reference.min(0).values, reference.max(0).values
                deviations = [float(((token - low) / (high - low)).std()) for token in x[start : start + lag]]
                spread = [a + b for a, b in zip(spread, softmax(deviations), strict=True)]
            order = sorted(spread)
            margin = min(margin, *(b - a for a, b in pairwise(order)))
            row[start : start + lag] = [order.index(x) / lag for x in spread]
        scores.append(row)
    return scores, margin


# ---------------------------------------------------------------- of queries
def snapkv(text: ScoredText, past: Past, options: Any, history: dict[Any, Any]) -> Scores:
    scores = []
    for head in heads_of(text):
        rows = [
            weights_of(text, past, query, query_head)
            for query in range(max(past.length - options.window, 0), past.length)
            for query_head in group_of(text, head)
        ]
        observed = [p >= past.length - options.window for p in past.positions[head].tolist()]
        weights = [0.0 if hidden else w for w, hidden in zip(mean(rows), observed, strict=True)]
        reach = options.kernel_size // 2
        row = [
            sum(weights[max(i - reach, 0) : i + reach + 1]) / options.kernel_size if not observed[i] else INF
            for i in range(len(weights))
        ]
        scores.append(row)
    return scores, INF


def tova(text: ScoredText, past: Past, options: Any, history: dict[Any, Any]) -> Scores:
    row = mean([weights_of(text, past, past.length - 1, query_head) for query_head in range(text.spec.num_q_heads)])
    row = [INF if p == past.length - 1 else w for w, p in zip(row, past.positions[0].tolist(), strict=True)]
    return [row for _ in heads_of(text)], INF


def h2o(text: ScoredText, past: Past, options: Any, history: dict[Any, Any]) -> Scores:
    scores = []
    for head in heads_of(text):
        positions = past.positions[head].tolist()
        for query in range(past.length - past.num_new, past.length):
            for query_head in group_of(text, head):
                weights = weights_of(text, past, query, query_head)
                for position, weight in zip(positions, weights, strict=True):
                    share = weight / len(group_of(text, head))
                    history[head, position] = history.get((head, position), 0.0) + share
        scores.append([history.get((head, position), 0.0) for position in positions])
    return scores, INF


def r_kv(text: ScoredText, past: Past, options: Any, history: dict[Any, Any]) -> Scores:
    scores, margin = [], INF
    sinks = text.spec.sink_logits
    for head in heads_of(text):
        observed = [p >= past.length - options.window for p in past.positions[head].tolist()]
        rows = []
        for query in range(max(past.length - options.window, 0), past.length):
            by_head = [logits_of(text, past, query, query_head) for query_head in group_of(text, head)]
            logits = [max(column) for column in zip(*by_head, strict=True)]
            sink = None if sinks is None else max(float(sinks[query_head]) for query_head in group_of(text, head))
            rows.append(softmax([-INF if o else x for x, o in zip(logits, observed, strict=True)], sink))
        weights, reach = mean(rows), options.kernel_size // 2
        importance = [max(weights[max(i - reach, 0) : i + reach + 1]) for i in range(len(weights))]

        keys = [key / key.norm() for key in keys_of(text, past, head)]
        n = len(keys)
        similarity = [[float(keys[i] @ keys[j]) if i != j else 0.0 for j in range(n)] for i in range(n)]
        for i in range(n):
            margin = min(margin, *(abs(similarity[i][j] - options.threshold) for j in range(n) if i != j))
            similar = [j for j in range(n) if similarity[i][j] > options.threshold]
            if similar:
                similarity[i][similar[-1]] = 0.0
        redundancy = softmax(mean(similarity))
        mix = options.mix_lambda
        row = [mix * a - (1 - mix) * b for a, b in zip(importance, redundancy, strict=True)]
        scores.append([INF if o else x for x, o in zip(row, observed, strict=True)])
    return scores, margin


def expected_attention(text: ScoredText, past: Past, options: Any, history: dict[Any, Any]) -> Scores:
    spec, length = text.spec, past.length
    future = torch.arange(length, length + options.num_future_positions)
    basis = torch.eye(spec.head_dim, dtype=torch.float64)
    rotation = sum(rotate(basis[None], t[None])[0].T for t in future) / len(future)  # columns: rotated basis vectors
    assert isinstance(rotation, Tensor)
    scores = []
    for head in heads_of(text):
        positions = past.positions[head].tolist()
        keys, values = keys_of(text, past, head), values_of(text, past, head)
        rows = []
        for query_head in group_of(text, head):
            queries = torch.stack(
                [
                    rotate(text.queries[p, query_head].double()[None, None], torch.tensor([-p]))[0, 0]
                    for p in range(options.sinks, length)
                ]
            )
            middle = rotation @ queries.mean(0)
            covariance = rotation @ torch.cov(queries.T, correction=0) @ rotation.T
            logits = []
            for position, key in zip(positions, keys, strict=True):
                x = float(key @ middle) * spec.scale
                if options.use_covariance:
                    x += float(key @ covariance @ key) * spec.scale**2 / 2
                logits.append(x if position >= options.sinks else -INF)
            rows.append(softmax(logits))
        row = mean(rows)
        if options.use_vnorm:
            row = [(x + options.epsilon) * float(value.norm()) for x, value in zip(row, values, strict=True)]
        scores.append([x if p >= options.sinks else INF for x, p in zip(row, positions, strict=True)])
    return scores, INF


# ---------------------------------------------------------------- of positions
def streaming_llm(text: ScoredText, past: Past, options: Any, history: dict[Any, Any]) -> Scores:
    return [[float(p) for p in row] for row in past.positions.tolist()], INF


def random(text: ScoredText, past: Past, options: Any, history: dict[Any, Any]) -> Scores:
    def mixed(x: int) -> int:
        x %= 2**32
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    rows = past.positions.tolist()
    heads = [mixed(options.seed)] * len(rows)
    if options.per_head:
        heads = [mixed(mixed(heads[0] + past.layer_idx) + head) for head in range(len(rows))]
    return [[mixed(head + p) / 2**32 for p in row] for head, row in zip(heads, rows, strict=True)], INF
