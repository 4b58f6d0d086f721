"""Chooses the rows of `make bench` that are compared with other servers, and sends their workloads to a server.

All servers get the same requests from the same client, `kvmux bench`: token ids, greedy, answers of full length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from loadtest.bench.workloads import NAMED_WORKLOADS
from tools.bench.table.goals import DEFAULT_STRATEGY, ROWS, BenchmarkRow, Measure
from tools.bench.table.models import QWEN
from tools.bench.table.runs import Results
from tools.peers.programs import ServerNeeds
from tools.server_process import RunError, run_bench

WORKLOADS = ("a", "b", "c8", "c16", "e1", "e8", "e16", "f", "g")
DEFAULT_WORKLOADS = ("a", "b", "c8", "e8", "e16", "f")
MEASURES: frozenset[Measure] = frozenset({"decode", "prefill", "ttft", "output", "step"})
WORKLOAD_TIMEOUT = 900.0  # seconds that a workload may take
SPARE_TOKENS = 64  # of a sequence: room for what a server adds to a prompt


def list_rows(workloads: Iterable[str]) -> list[BenchmarkRow]:
    """Return the rows of these workloads that every server can have: one model in bfloat16, no choice of strategy."""
    chosen = set(workloads)
    return [
        row
        for row in ROWS
        if row.shape is QWEN
        and row.weights == "auto"
        and row.strategy == DEFAULT_STRATEGY
        and row.group != "strategies"
        and row.measure in MEASURES
        and row.workload in chosen
    ]


def compute_needs(workloads: Iterable[str]) -> ServerNeeds:
    """Return what a server has to be started with for all of these workloads."""
    named = [NAMED_WORKLOADS[name] for name in workloads]
    tokens = max(each.shared_tokens + each.prompt_tokens + each.max_tokens for each in named)
    return ServerNeeds(max(each.arrivals.max_concurrency or 1 for each in named), tokens + SPARE_TOKENS)


def run_workload(
    url: str, workload: str, name: str, timeout: float = WORKLOAD_TIMEOUT, seed: int | None = None
) -> Results:
    """Run a workload once and return its results. Raises RunError if a request fails, or an answer has a wrong length.

    Answers of kvmux are those of its default strategy. `name` names the server. The same `seed` gives the same prompts,
    and no others are sent before them, so that a server that has computed them finds them all.
    """
    repeated = [] if seed is None else ["--seed", str(seed), "--no-warm-up"]
    flags = ["--workload", workload, "--rounds", "1", *repeated]
    results = run_bench(url, [*flags, "--strategies", DEFAULT_STRATEGY] if name == "kvmux" else flags, timeout)
    if any(each["not_of_asked_length"] for each in results):
        raise RunError("answers do not have the requested length")
    return results


def adapt_row(row: BenchmarkRow, results: Results) -> BenchmarkRow:
    """Return the row under the name that the results of a server without strategies have: its model's."""
    names = {str(each["strategy"]) for each in results}
    return row if row.strategy in names else replace(row, strategy=names.pop())


def group_workloads(workloads: Sequence[str], *, alone: bool) -> list[Sequence[str]]:
    """Return the workloads that share a start of a server: all, or with `alone` each by itself."""
    return [[each] for each in workloads] if alone else [workloads]
