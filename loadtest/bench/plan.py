"""Plans a benchmark: chooses workloads and strategies from the options and from what the server lists."""

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
# The workload whose lengths and arrivals are changed by flags such as --rate if no --workload is given.
CUSTOM = replace(NAMED_WORKLOADS["c8"], name="own")
MIXED = "mixed"  # name of the report's row for requests that are distributed among all strategies
# Maximum of a prompt's words and its answer's tokens together, in percent of the model's context in tokens.
MAX_WORDS_PERCENT = 75


def plan_workloads(options: BenchOptions) -> list[Workload]:
    """Return the workloads that the options name, with lengths and arrivals replaced by those given in flags.

    Raises WorkloadError if --trace is combined with --workload, or if its file cannot be read.
    """
    if options.trace:
        if options.workload:
            raise WorkloadError("--trace cannot be combined with --workload: leave one of them out")
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
    """Return the workload with fields replaced by `changes` and with `requests` requests.

    If `requests` is None, their number depends on the arrivals in `changes`: enough for three bursts; one per client
    of a closed loop; for random arrivals four times the workload's own number; without arrivals that number.
    """
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
    """Return the number of rounds: as the options say, else 1 for a trace and 3 for other workloads."""
    return options.rounds or (1 if options.trace else DEFAULT_ROUNDS)


def fit_workloads(workloads: Sequence[Workload], server: ServerInfo) -> tuple[list[Workload], list[str]]:
    """Return (the workloads, shortened to fit into the model's context; notes for the report on what was changed).

    Raises WorkloadError if the context is too short to be measured.
    """
    context, notes = server.listing.max_model_len, []
    if not server.vocabulary.has_token_ids:
        notes.append("the server has no /tokenize: prompts are words, and their lengths in tokens are not exact")
        context = context and context * MAX_WORDS_PERCENT // 100
    fitted = [fit_workload(each, context) for each in workloads]
    return [workload for workload, _ in fitted], [*notes, *(note for _, note in fitted if note)]


def select_strategies(server: ServerInfo, wanted: Sequence[str], *, mixed: bool = False) -> dict[str, Sequence[str]]:
    """Return the model names to send requests to (such as "tiny:paged"), by the strategy that the report names.

    Without strategies it is the model's name alone. `mixed` adds an entry with the names of all strategies. Raises
    ListingError if the server does not list one of the strategies `wanted`.
    """
    listing = server.listing
    models = select_models(listing, dict.fromkeys(wanted, 1.0))
    names = (listing.strategies or {listing.model: listing.model}).items()
    single: dict[str, Sequence[str]] = {name: [model] for name, model in names if model in models}
    return single | ({MIXED: [model for _, model in names if model in models]} if mixed and len(single) > 1 else {})
