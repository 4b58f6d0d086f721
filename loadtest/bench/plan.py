"""What to measure: from what is wanted and what a server offers to workloads and strategies. Sends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from loadtest.bench.arrivals import Arrivals, Bursts, Closed, Poisson
from loadtest.bench.ask import ServerInfo
from loadtest.bench.flags import BenchOptions
from loadtest.bench.workloads import NAMED, QUICK, Drawn, Workload, WorkloadError, fit, read_trace
from loadtest.listing import chosen

ROUNDS = 3
CUSTOM = replace(NAMED["c8"], name="own")  # what flags change, if no workload is named
MIXED = "mixed"  # a row of the report: all strategies at once
WORDS_FIT = 75  # per cent of the context that as many words are sure to leave room in


def planned(wanted: BenchOptions) -> list[Workload]:
    """The workloads asked for, each with what the flags change. Raises WorkloadError."""
    if wanted.trace:
        if wanted.workload:
            raise WorkloadError("--trace is a workload by itself: leave --workload out")
        return [read_trace(wanted.trace, wanted.requests, wanted.speed_up)]
    lengths = {"own": wanted.prompt_tokens, "shared": wanted.shared_tokens, "answer": wanted.max_tokens}
    changes: dict[str, Any] = {name: value for name, value in lengths.items() if value is not None}
    if (arrivals := arrivals_of(wanted)) is not None:
        changes["arrivals"] = arrivals
    if wanted.shared_tokens:
        changes["phases"] = ("cold", "warm")
    named = wanted.workload or (() if changes or wanted.requests else QUICK)
    return [changed(each, changes, wanted.requests) for each in [NAMED[name] for name in named] or [CUSTOM]]


def arrivals_of(wanted: BenchOptions) -> Arrivals | None:
    if wanted.rate is not None:
        return Poisson(wanted.rate)
    if wanted.burst is not None:
        return Bursts(wanted.burst, wanted.every)
    return None if wanted.concurrency is None else Closed(wanted.concurrency)


def changed(workload: Drawn, changes: Mapping[str, Any], requests: int | None) -> Drawn:
    """With as many requests as are told, or else enough for new arrivals to be seen."""
    match changes.get("arrivals"):
        case Bursts(size=size):
            enough = 3 * size
        case Closed(at_once=streams):
            enough = streams
        case Poisson():
            enough = 4 * workload.requests
        case _:
            enough = workload.requests
    return replace(workload, **changes, requests=requests or enough)


def rounds_of(wanted: BenchOptions) -> int:
    """How often all is measured; a trace is long by itself."""
    return wanted.rounds or (1 if wanted.trace else ROUNDS)


def fit_all(workloads: Sequence[Workload], server: ServerInfo) -> tuple[list[Workload], list[str]]:
    """The workloads, no longer than the model's context; what had to be changed. Raises WorkloadError."""
    context, notes = server.listing.context, []
    if not server.vocabulary.exact:
        notes.append("the server has no /tokenize: prompts are words, and their lengths not exact")
        context = context and context * WORDS_FIT // 100
    fitted = [fit(each, context) for each in workloads]
    return [workload for workload, _ in fitted], [*notes, *(note for _, note in fitted if note)]


def strategies_of(server: ServerInfo, wanted: Sequence[str], *, mixed: bool = False) -> dict[str, Sequence[str]]:
    """The model's name by strategy, or by itself; with `mixed`, several in one, too. Raises ListingError."""
    listing = server.listing
    models = chosen(listing, dict.fromkeys(wanted, 1.0))
    named = (listing.strategies or {listing.model: listing.model}).items()
    alone: dict[str, Sequence[str]] = {name: [model] for name, model in named if model in models}
    return alone | ({MIXED: [model for _, model in named if model in models]} if mixed and len(alone) > 1 else {})
