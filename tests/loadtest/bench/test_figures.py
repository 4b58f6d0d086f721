"""Figures, compared with numpy and with values by hand."""

from __future__ import annotations

from random import Random

import numpy
import pytest

from loadtest.bench.figures import PERCENTILES, Figures, compute_percentiles, summarize_latency
from loadtest.bench.types import Outcome
from loadtest.stream import Reply


@pytest.mark.parametrize("count", [1, 2, 3, 20, 999])
def test_percentiles_are_those_of_numpy(count: int) -> None:
    random = Random(count)
    values = [random.expovariate(1.0) for _ in range(count)]
    found = compute_percentiles(values)
    assert [found[each] for each in PERCENTILES] == pytest.approx(list(numpy.percentile(values, PERCENTILES)))
    told = summarize_latency(values)
    assert told is not None
    assert told["mean"] == pytest.approx(1000 * numpy.mean(values))
    assert told["max"] == 1000 * max(values)


def test_nothing_has_no_spread() -> None:
    assert summarize_latency([]) is None


def outcome(sent: float, *arrivals: float, cached: int | None = 5, asked: int = 3, error: str | None = None) -> Outcome:
    """Return an answer with a token per arrival, to a prompt of ten tokens."""
    reply = Reply(list(arrivals), arrivals[-1] if arrivals else None, [], 10, cached, len(arrivals))
    return Outcome(asked, sent, reply, error)


def test_rounds_add_up() -> None:
    figures = Figures()
    figures.add_round([outcome(0.0, 1.0, 1.5, 3.0), outcome(1.0, 3.0, 3.5, 4.0)])
    figures.add_round([outcome(10.0, 11.0, 12.0), outcome(10.0, error="HTTP 500")])
    assert figures.round_seconds == [4.0, 2.0]
    assert figures.output_throughput == pytest.approx(8 / 6)
    assert figures.output_throughput_by_round() == [6 / 4, 2 / 2]
    assert len(figures.outcomes) == 4
    assert figures.error_counts == {"HTTP 500": 1}
    assert figures.num_wrong_length == 1
    assert (figures.prompt_tokens, figures.completion_tokens, figures.pieces) == (30, 8, 8)
    assert (figures.cached_tokens, figures.cache_hit_rate) == (15, 0.5)
    ttft, itl, e2e = figures.ttft(), figures.itl(), figures.e2e()
    assert ttft is not None
    assert (ttft["p50"], ttft["max"]) == (1000, 2000)
    assert itl is not None
    assert (itl["p50"], itl["max"]) == (500, 1500)
    assert e2e is not None
    assert e2e["p50"] == 3000


def test_times_while_all_decode_have_no_prefill_in_them() -> None:
    figures = Figures()
    early, late = outcome(0.0, 1.0, 4.0, 5.0, 5.5), outcome(0.0, 4.0, 5.0, 6.0, 9.0)
    figures.add_round([early, late])  # the second prompt takes until 4.0, and the first answer ends at 5.5
    found = figures.full_batch_itl()
    assert found is not None
    assert (found["max"], found["mean"]) == (1000, pytest.approx(1000 * (1.0 + 0.5 + 1.0) / 3))
    for waiting in (outcome(0.0, 6.0, 7.0), outcome(0.0, error="gone")):
        figures = Figures()
        figures.add_round([early, waiting])
        assert figures.full_batch_itl() is None


def test_what_failed_altogether_has_no_figures() -> None:
    figures = Figures()
    figures.add_round([outcome(0.0, error="gone")])
    assert (
        figures.ttft() is figures.itl() is figures.e2e() is figures.output_throughput is figures.cache_hit_rate is None
    )
    assert figures.output_throughput_by_round() == []


def test_a_server_need_not_tell_what_was_cached() -> None:
    figures = Figures()
    figures.add_round([outcome(0.0, 1.0, cached=None)])
    assert figures.cache_hit_rate is figures.cached_tokens is None
