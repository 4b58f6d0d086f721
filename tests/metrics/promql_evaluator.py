"""Evaluate PromQL of the dashboards from two texts of /metrics, to compare with what Prometheus answers.

As much of PromQL as they use. Rates are over the time between the two; gauges are as they were after.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable

from tests.metrics.fake_metrics import Samples

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]

TOKEN = re.compile(r"\s*([a-zA-Z_]\w*(?:\{[^}]*\})?|[\d.]+|\[[^\]]*\]|[()*/>,-])")
SELECTOR = re.compile(r'(\w+)(=~|=)"([^"]*)"')


class Evaluator:
    """`instance`: what Prometheus calls the server."""

    def __init__(self, before: Samples, after: Samples, seconds: float, instance: str) -> None:
        self._seconds = seconds
        self._after: dict[str, Vector] = defaultdict(dict)  # by name
        self._growth: dict[str, Vector] = defaultdict(dict)
        for (name, labels), value in after.items():
            known = labels | {("instance", instance)}
            self._after[name][known] = value
            self._growth[name][known] = value - before.get((name, labels), 0)
        self._tokens: list[str] = []

    def __call__(self, expression: str) -> Vector:
        self._tokens = TOKEN.findall(expression)
        assert "".join(self._tokens) == re.sub(r"\s+(?![^{]*\})", "", expression), expression
        value = self._comparison()
        assert not self._tokens, self._tokens
        return value

    # ---------------------------------------------------------------- operators, the weakest first
    def _comparison(self) -> Vector:
        value = self._difference()
        if self._take(">"):
            limit = float(self._next())
            return {labels: each for labels, each in value.items() if each > limit}
        return value

    def _difference(self) -> Vector:
        value = self._product()
        while self._take("-"):
            other = self._product()
            value = {labels: value[labels] - other[labels] for labels in value.keys() & other.keys()}
        return value

    def _product(self) -> Vector:
        value = self._quotient()
        while self._take("*"):
            other = self._quotient()
            value = {labels: value[labels] * other[labels] for labels in value.keys() & other.keys()}
        return value

    def _quotient(self) -> Vector:
        value = self._operand()
        while self._take("/"):
            to_one = self._take("on")
            if to_one:
                for expected in ("(", ")", "group_left", "(", ")"):
                    assert self._take(expected)
            other = self._operand()
            if to_one:
                (only,) = other.values() or (math.nan,)
                other = dict.fromkeys(value, only)
            value = {labels: value[labels] / other[labels] for labels in value.keys() & other.keys()}
        return value

    # ---------------------------------------------------------------- operands
    def _operand(self) -> Vector:
        token = self._next()
        if token == "(":
            return self._closed(self._comparison())
        if token in ("sum", "max"):
            return self._aggregate(sum if token == "sum" else max)
        if token == "rate":
            return self._rate()
        if token == "histogram_quantile":
            assert self._take("(")
            share = float(self._next())
            assert self._take(",")
            return self._closed(quantile(share, self._comparison()))
        return self._selected(token, self._after)

    def _aggregate(self, how: Callable[[list[float]], float]) -> Vector:
        by = set[str]()
        if self._take("by"):
            assert self._take("(")
            while not self._take(")"):
                by |= {self._next()} - {","}
        assert self._take("(")
        groups: defaultdict[Labels, list[float]] = defaultdict(list)
        for labels, value in self._closed(self._comparison()).items():
            groups[frozenset((k, v) for k, v in labels if k in by)].append(value)
        return {labels: how(values) for labels, values in groups.items()}

    def _rate(self) -> Vector:
        assert self._take("(")
        growth = self._selected(self._next(), self._growth)
        assert self._next().startswith("[")
        return self._closed({labels: value / self._seconds for labels, value in growth.items()})

    def _selected(self, selector: str, samples: dict[str, Vector]) -> Vector:
        name, _, conditions = selector.partition("{")
        wanted = [
            (label, text if how == "=~" else re.escape(text)) for label, how, text in SELECTOR.findall(conditions)
        ]
        return {
            labels: value
            for labels, value in samples[name].items()
            if all(re.fullmatch(text, dict(labels).get(label, "")) for label, text in wanted)
        }

    # ---------------------------------------------------------------- tokens
    def _next(self) -> str:
        return self._tokens.pop(0)

    def _take(self, token: str) -> bool:
        if self._tokens[:1] != [token]:
            return False
        self._tokens.pop(0)
        return True

    def _closed(self, value: Vector) -> Vector:
        assert self._take(")")
        return value


def quantile(share: float, buckets: Vector) -> Vector:
    """Return a quantile, interpolated linearly within its bucket; above the last edge, that edge."""
    histograms: defaultdict[Labels, dict[float, float]] = defaultdict(dict)
    for labels, count in buckets.items():
        edge = float(dict(labels)["le"])
        histograms[frozenset((k, v) for k, v in labels if k != "le")][edge] = count
    return {labels: _quantile(share, sorted(histogram.items())) for labels, histogram in histograms.items()}


def _quantile(share: float, buckets: list[tuple[float, float]]) -> float:
    wanted = share * buckets[-1][1]
    if not buckets[-1][1]:
        return math.nan
    lower_edge = lower = 0.0
    for edge, count in buckets:
        if count >= wanted:
            width = 0 if edge == math.inf else edge - lower_edge
            return lower_edge + width * (wanted - lower) / (count - lower)
        lower_edge, lower = edge, count
    raise AssertionError
