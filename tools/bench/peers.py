"""Measures llama.cpp and vLLM beside kvmux over HTTP: `make bench-peers`.

All servers get the same requests from the same client, `kvmux bench`: token ids, greedy, answers of full length.
"""

from __future__ import annotations

import shlex
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import SystemRandom

from loadtest.bench.workloads import NAMED_WORKLOADS
from tools.bench.goals import DEFAULT_STRATEGY, ROWS, BenchmarkRow, Measure
from tools.bench.models import QWEN, cache_folder, make_model, peers_folder
from tools.bench.rows import BENCHMARKS, Results, measure_speeds, read_results
from tools.bench.runner import Case, Context, Effort, Group, Reading, Table
from tools.peers.installer import Installer, InstallError, parse_folder
from tools.peers.programs import ServerNeeds, ServerProgram, StartedServer, run_program
from tools.peers.servers import OURS, prepare_kvmux, prepare_llama_cpp, prepare_vllm
from tools.server_process import RunError, run_bench

WORKLOADS = ("a", "b", "c8", "c16", "e1", "e8", "e16", "f", "g")
DEFAULT_WORKLOADS = ("a", "b", "c8", "e8", "e16", "f")
MEASURES: frozenset[Measure] = frozenset({"decode", "prefill", "ttft", "output", "step"})
DECODING: frozenset[Measure] = frozenset({"decode", "step"})  # measures that do not depend on computing prompts
WORKLOAD_TIMEOUT = 900.0  # seconds that a workload may take
SPARE_TOKENS = 64  # of a sequence: room for what a server adds to a prompt
PEERS: Mapping[str, Callable[[Path, Installer], ServerProgram]] = {
    "llama.cpp": prepare_llama_cpp,
    "vllm": prepare_vllm,
}


def add_arguments(parser: ArgumentParser) -> None:
    add, rows = parser.add_argument, " ".join(DEFAULT_WORKLOADS)
    add("--peers", nargs="*", choices=tuple(PEERS), default=list(PEERS), help="servers beside kvmux (default: all)")
    add(
        "--rows",
        nargs="+",
        choices=WORKLOADS,
        default=list(DEFAULT_WORKLOADS),
        help=f"workloads of `kvmux bench` (default: {rows})",
    )
    add(
        "--decode-only",
        action="store_true",
        help="only the rows between two tokens: servers go on running and find the prompts in their caches, so a turn "
        "takes a minute where computing the prompts of long contexts takes half an hour",
    )
    add("--models", type=parse_folder, default=cache_folder(), help="folder of models (default: in the user's cache)")
    add_folder_arguments(parser)


def add_folder_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=parse_folder, default=peers_folder(), help="folder of servers (default: in the user's cache)")
    add("--pip-args", default="", help="further arguments of pip, such as an index with torch's builds for CPUs")


def make_installer(context: Context, name: str) -> Installer:
    options = context.options
    return Installer(options.folder / name, shlex.split(options.pip_args), context.show_status)


def list_cases(context: Context) -> Iterator[Case]:
    """Install the servers, and yield a case for their turns, or with --decode-only for each workload."""
    options = context.options
    model = make_model(QWEN, options.models, context.show_status)
    programs = {OURS: prepare_kvmux(model)}
    for name in options.peers:
        try:
            program = PEERS[name](model, make_installer(context, name))
            programs[program.name] = program
        except InstallError as error:
            context.notes.append(f"{name} could not be installed: {error}")
    workloads = [name for name in WORKLOADS if name in options.rows]
    context.notes.extend(describe_program(each, compute_needs(workloads)) for each in programs.values())
    table = Table(f"{QWEN.name} over HTTP", base=OURS)
    if not options.decode_only:
        yield Case("servers", table, partial(_measure_start, programs, workloads), list(programs))
        return
    for workload in workloads:
        if rows := [row for row in list_rows([workload]) if row.measure in DECODING]:
            seed = SystemRandom().randrange(1 << 32)
            set_up = partial(_start_all, programs, workload, seed)
            measure = partial(_measure_running, workload, rows, seed)
            yield Case(f"decoding of {workload}", table, measure, list(programs), set_up)


def describe_program(program: ServerProgram, needs: ServerNeeds) -> str:
    """Return the version of a server, and the command that starts it for these needs."""
    command = program.make_command(needs, 0).describe().replace(" --port 0", "")
    alone = ", for each workload with its streams and lengths" if program.start_for_each_workload else ""
    return f"{program.name}: {program.version}, `{command}`{alone}"


# ---------------------------------------------------------------- a start in each turn
def _measure_start(
    programs: Mapping[str, ServerProgram], workloads: Sequence[str], _: None, name: str
) -> Iterator[Reading]:
    """Start a server and run all workloads on it, or start it for each of them if it is faster so."""
    program = programs[name]
    for shared in [[each] for each in workloads] if program.start_for_each_workload else [workloads]:
        left = list(shared)
        try:
            with run_program(program, compute_needs(shared)) as server:
                while left:
                    workload = left.pop(0)
                    yield from _measure_workload(name, server, workload, list_rows([workload]))
        except RunError as error:  # it did not start, or its client was ended; others may still be measured
            yield from (Reading(row.describe(), None, reason=str(error)) for row in list_rows(left))


# ---------------------------------------------------------------- servers that go on running
@contextmanager
def _start_all(
    programs: Mapping[str, ServerProgram], workload: str, seed: int
) -> Iterator[Mapping[str, StartedServer | RunError]]:
    """Yield all servers, which have computed the prompts of a workload, or the errors of those that failed."""
    started: dict[str, StartedServer | RunError] = {}
    with ExitStack() as servers:
        for name, program in programs.items():
            try:
                server = started[name] = servers.enter_context(run_program(program, compute_needs([workload])))
                run_workload(server.url, workload, name, seed)
            except RunError as error:
                started[name] = error
        yield started


def _measure_running(
    workload: str,
    rows: Sequence[BenchmarkRow],
    seed: int,
    started: Mapping[str, StartedServer | RunError],
    name: str,
) -> Iterator[Reading]:
    server = started[name]
    if isinstance(server, RunError):
        yield from (Reading(row.describe(), None, reason=str(server)) for row in rows)
    else:
        yield from _measure_workload(name, server, workload, rows, seed)


# ---------------------------------------------------------------- one workload
def _measure_workload(
    name: str, server: StartedServer, workload: str, rows: Sequence[BenchmarkRow], seed: int | None = None
) -> Iterator[Reading]:
    """Run a workload and yield the readings of rows; the same `seed` gives the same prompts, None new ones."""
    speeds = measure_speeds(rows[0])
    try:
        results = run_workload(server.url, workload, name, seed)
    except RunError as error:
        yield from (Reading(row.describe(), None, reason=str(error)) for row in rows)
    else:
        yield from read_results([adapt_row(row, results) for row in rows], results, (), speeds, 0)


def run_workload(url: str, workload: str, name: str, seed: int | None = None) -> Results:
    """Run a workload once and return its results. Raises RunError if a request fails, or an answer has a wrong length.

    Answers of kvmux are those of its default strategy. `name` names the server. The same `seed` gives the same prompts,
    and no others are sent before them, so that a server that has computed them finds them all.
    """
    repeated = [] if seed is None else ["--seed", str(seed), "--no-warm-up"]
    flags = ["--workload", workload, "--rounds", "1", *repeated]
    results = run_bench(url, [*flags, "--strategies", DEFAULT_STRATEGY] if name == OURS else flags, WORKLOAD_TIMEOUT)
    if any(each["not_of_asked_length"] for each in results):
        raise RunError("answers do not have the requested length")
    return results


def adapt_row(row: BenchmarkRow, results: Results) -> BenchmarkRow:
    """Return the row under the name that the results of a server without strategies have: its model's."""
    names = {str(each["strategy"]) for each in results}
    return row if row.strategy in names else replace(row, strategy=names.pop())


def list_rows(workloads: Iterable[str]) -> list[BenchmarkRow]:
    """Return the rows of these workloads that every server can have: one model in bfloat16, no choice of strategy."""
    chosen = set(workloads)
    return [
        replace(row, goal=None, peers={})
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


GROUP = Group(
    """\
Installs llama.cpp (built from source) and vLLM (its build for CPUs), each in a folder and an environment of its own,
and measures them and `kvmux serve` over HTTP: one at a time, by turns, with the same requests to a model of
Qwen2.5-0.5B's shape with random weights, in bfloat16. Beside each figure stands its share of the machine's limit,
measured just before. What is installed is kept for the next time. Six turns have intervals of 95 %.""",
    list_cases,
    add_arguments,
    Effort(2),
    "make bench-peers",
    BENCHMARKS,
    parts=("peers", "decode_only"),
)
