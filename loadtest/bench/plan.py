"""The plan of a benchmark: workloads and strategies, from the options and what the server offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from loadtest.bench.arrivals import Arrivals, Bursts, Closed, Poisson
from loadtest.bench.flags import BenchOptions
from loadtest.bench.types import ServerInfo
from loadtest.bench.workloads import (
    DEFAULT_WORKLOADS,
    NAMED_WORKLOADS,
    Drawn,
    Workload,
    WorkloadError,
    fit_workload,
    read_trace,
)
from loadtest.listing import select_models

DEFAULT_ROUNDS = 3
CUSTOM = replace(NAMED_WORKLOADS["c8"], name="own")  # the workload that flags change if none is named
MIXED = "mixed"  # the row of the report for all strategies at once
MAX_WORDS_PERCENT = 75  # of the context's tokens: a prompt of so many words fits into it


def plan_workloads(options: BenchOptions) -> list[Workload]:
    """Return the requested workloads, changed by the flags. Raises WorkloadError."""
    if options.trace:
        if options.workload:
            raise WorkloadError("--trace is a workload of its own: leave --workload out")
        return [read_trace(options.trace, options.requests, options.speed_up)]
    lengths = {name: getattr(options, name) for name in ("prompt_tokens", "shared_tokens", "max_tokens")}
    changes: dict[str, Any] = {name: value for name, value in lengths.items() if value is not None}
    if (arrivals := make_arrivals(options)) is not None:
        changes["arrivals"] = arrivals
    if options.shared_tokens:
        changes["phases"] = ("cold", "warm")
    names = options.workload or (() if changes or options.requests else DEFAULT_WORKLOADS)
    return [
        apply_overrides(each, changes, options.requests)
        for each in [NAMED_WORKLOADS[name] for name in names] or [CUSTOM]
    ]


def make_arrivals(options: BenchOptions) -> Arrivals | None:
    if options.rate is not None:
        return Poisson(options.rate)
    if options.burst is not None:
        return Bursts(options.burst, options.every)
    return None if options.concurrency is None else Closed(options.concurrency)


def apply_overrides(workload: Drawn, changes: Mapping[str, Any], requests: int | None) -> Drawn:
    """Return a changed workload; if `requests` is None it gets enough of them to show the effect of new arrivals."""
    match changes.get("arrivals"):
        case Bursts(size=size):
            enough = 3 * size
        case Closed(max_concurrency=streams):
            enough = streams
        case Poisson():
            enough = 4 * workload.requests
        case _:
            enough = workload.requests
    return replace(workload, **changes, requests=requests or enough)


def get_num_rounds(options: BenchOptions) -> int:
    """Return the number of rounds; a trace is long enough for one."""
    return options.rounds or (1 if options.trace else DEFAULT_ROUNDS)


def fit_workloads(workloads: Sequence[Workload], server: ServerInfo) -> tuple[list[Workload], list[str]]:
    """Return the workloads as they fit into the model's context, and notes on the changes. Raises WorkloadError."""
    context, notes = server.listing.max_model_len, []
    if not server.vocabulary.has_token_ids:
        notes.append("the server has no /tokenize: prompts are words, and their lengths in tokens are not exact")
        context = context and context * MAX_WORDS_PERCENT // 100
    fitted = [fit_workload(each, context) for each in workloads]
    return [workload for workload, _ in fitted], [*notes, *(note for _, note in fitted if note)]


def select_strategies(server: ServerInfo, wanted: Sequence[str], *, mixed: bool = False) -> dict[str, Sequence[str]]:
    """Return the model's name under each strategy; the model alone if there are none. Raises ListingError.

    `mixed` adds a row with the names of all strategies.
    """
    listing = server.listing
    models = select_models(listing, dict.fromkeys(wanted, 1.0))
    names = (listing.strategies or {listing.model: listing.model}).items()
    single: dict[str, Sequence[str]] = {name: [model] for name, model in names if model in models}
    return single | ({MIXED: [model for _, model in names if model in models]} if mixed and len(single) > 1 else {})
