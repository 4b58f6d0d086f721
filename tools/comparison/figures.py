"""Reads the figures of a cell from Prometheus, each by a PromQL query, and summarizes them over the rounds.

Every figure is a query at a time after the load, over the seconds since a scrape before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from tools.prometheus import Prometheus

SUBQUERY_STEP = "250ms"


class Figure(NamedTuple):
    """A figure that is read from Prometheus.

    The query has the fields {s} (labels that select the strategy), {begin} and {end} (Unix times), {range} (seconds
    between them) and {seconds} (from the first request to the end of the last answer).
    """

    name: str
    unit: str
    title: str
    query: str
    higher_is_better: bool
    scale: float = 1.0  # from Prometheus' unit to `unit`


def _quantile(share: float, metric: str) -> str:
    """Return the query of a percentile of what a histogram counted between two times."""
    return f"histogram_quantile({share}, {metric}_bucket{{s}} @ {{end}} - {metric}_bucket{{s}} @ {{begin}})"


def _growth(metric: str) -> str:
    """Return the query of how far a counter grew between two times."""
    return f"({metric}{{s}} @ {{end}} - {metric}{{s}} @ {{begin}})"


TTFT, ITL = "kvmux_time_to_first_token_seconds", "kvmux_inter_token_latency_seconds"
HITS, QUERIES = _growth("kvmux_prefix_cache_hits_total"), _growth("kvmux_prefix_cache_queries_total")
MEMORY = 'max_over_time((sum(kvmux_kv_cache_bytes{s,state=~"used|wasted"}))[{range}s:' + SUBQUERY_STEP + "] @ {end})"

FIGURES: Sequence[Figure] = (
    Figure("ttft_p50", "ms", "Time to the first token, median", _quantile(0.5, TTFT), False, 1e3),
    Figure("ttft_p95", "ms", "Time to the first token, 95th percentile", _quantile(0.95, TTFT), False, 1e3),
    Figure("itl_p50", "ms", "Time between tokens, median", _quantile(0.5, ITL), False, 1e3),
    Figure("itl_p95", "ms", "Time between tokens, 95th percentile", _quantile(0.95, ITL), False, 1e3),
    Figure(
        "tokens_per_second",
        "tokens/s",
        "Output tokens a second, all requests together",
        _growth("kvmux_generation_tokens_total") + " / {seconds}",
        True,
    ),
    Figure("kv_memory", "MiB", "KV memory of running requests, the most at a time", MEMORY, False, 2**-20),
    Figure("hit_rate", "%", "Prompt tokens found in the cache", f"{HITS} / ({QUERIES} > 0)", True, 100),
    Figure("preemptions", "", "Preemptions", _growth("kvmux_num_preemptions_total"), False),
)
BY_NAME: Mapping[str, Figure] = {each.name: each for each in FIGURES}


class Interval(NamedTuple):
    """The time of a cell: two Unix times with all of its load between them, and the seconds of the load itself."""

    begin: float
    end: float
    seconds: float


def make_query(figure: Figure, strategy: str, interval: Interval) -> str:
    """Return the query of a figure for a strategy and an interval."""
    selector = f'strategy="{strategy}"'
    # the strategy comes first in the braces of every selector, before other labels of a figure
    query = figure.query.replace("{s}", f"{{{selector}}}").replace("{s,", f"{{{selector},")
    fields = {
        "begin": f"{interval.begin:.3f}",
        "end": f"{interval.end:.3f}",
        "range": f"{math.ceil(interval.end - interval.begin)}",
        "seconds": f"{interval.seconds:.6f}",
    }
    for name, value in fields.items():
        query = query.replace(f"{{{name}}}", value)
    return query


def read_figures(prometheus: Prometheus, strategy: str, interval: Interval) -> dict[str, float | None]:
    """Return all figures of a cell by name, in Prometheus' units; None: there is no value, as for 0 / 0."""
    at_end = Prometheus(prometheus.client, interval.end)
    found = {}
    for figure in FIGURES:
        values = [value for _, value in at_end.query(make_query(figure, strategy, interval)) if math.isfinite(value)]
        found[figure.name] = values[0] if values else None
    return found


@dataclass(frozen=True)
class Summary:
    """A figure of a strategy under a load: the median of the rounds and their range, in the figure's unit."""

    value: float
    low: float
    high: float


def summarize(figure: Figure, readings: Sequence[float | None]) -> Summary | None:
    """Return the summary of a figure over the rounds; None if no round has a value."""
    values = [each * figure.scale for each in readings if each is not None]
    return Summary(median(values), min(values), max(values)) if values else None
