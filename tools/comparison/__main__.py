"""`make compare`: measures all strategies at several prompt lengths and batch sizes, and writes a report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import httpx
import torch

from cache_strategies.registry import list_kinds
from config.errors import SettingsError
from config.flags import flag_name, format_flag
from config.flags import parse_count_flag as count
from config.settings import Settings, StrategySettings, load_settings
from config.settings_file import format_settings, format_tables
from config.sources import ENV_PREFIX
from loadtest.bench.client import ServerError
from loadtest.listing import ListingError
from server.evaluation.command import make_progress_bar, parse_strategy, select_strategies
from server.models.files.directory import resolve_model_settings
from server.profiling.machine import read_processor_name
from server.version import get_version
from tools.comparison.fidelity import evaluate
from tools.comparison.measure import SCRAPE_INTERVAL, CellMeter
from tools.comparison.plan import Cell, Plan
from tools.comparison.report import ReportSetup, make_page
from tools.comparison.results import Comparison
from tools.prometheus import PromQLError, find_tool, make_config, run_prometheus
from tools.server_process import RunError, run_server, sigterm_as_ctrl_c

DESCRIPTION = """\
In each round starts a server for each strategy, which no other one shares, and a Prometheus that scrapes it, and loads
it at each prompt length and batch size, with the client of `kvmux bench`. Then measures by `kvmux evaluate` how far
each strategy is from exact caching. Writes report.html (which strategy suits which load, and why, with all figures) and
results.json into the folder --out, also when it is interrupted."""

EPILOG = """\
examples:
  make compare
  make compare ARGS="--model ~/models/llama --strategies paged paged:k_dtype=int8,v_dtype=int8 compressed:budget=0.25"
  make compare ARGS="--config kvmux.toml --prompt-tokens 4096 --batch 1 8 32 --kv-memory 4GiB"
"""

REPORT, RESULTS = "report.html", "results.json"
# Beside every kind with its default options
MORE_STRATEGIES = ("paged:k_dtype=int8,v_dtype=int8", "compressed:budget=0.25")
SERVER_FLAGS = ("model", "dtype", "device", "threads", "weights", "kv_memory")  # settings that are flags here, too
USER_ERROR, INTERRUPTED = 2, 130  # exit statuses
SERVER_ERRORS = (RunError, ServerError, httpx.HTTPError)  # of one server
USER_ERRORS = (SettingsError, ListingError, PromQLError, OSError, *SERVER_ERRORS)
# Settings that do not concern a comparison: who may do what, which instances there are, and which requests they get.
EXCLUDED_SETTINGS = {
    "strategies",
    "default_strategy",
    "preset",
    "rules",
    "rollouts",
    "rollouts_file",
    "board",
    "api_keys",
    "key_limits",
    "admin_token",
    "metrics_key",
    "host",
    "port",
    "metrics_host",
    "metrics_port",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    with sigterm_as_ctrl_c():
        try:
            page = compare(options)
        except USER_ERRORS as error:
            print(f"make compare: {error}", file=sys.stderr)
            return USER_ERROR
        except KeyboardInterrupt:  # also SIGTERM; the started processes have ended by now
            print(f"make compare: interrupted; what was measured is in {options.out}", file=sys.stderr)
            return INTERRUPTED
    print(page)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make compare",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--strategies",
        nargs="+",
        metavar="NAME",
        help="instances of the settings, kinds, or KIND:option=value, as for `kvmux evaluate` (default: every kind, "
        f"plug-ins' too, and {', '.join(MORE_STRATEGIES)})",
    )
    add("--prompt-tokens", nargs="+", type=count, default=[128, 512, 1536], metavar="N", help="prompt lengths")
    add("--batch", nargs="+", type=count, default=[1, 4, 16], metavar="N", help="numbers of requests at a time")
    add("--max-tokens", type=count, default=64, metavar="N", help="tokens of an answer (default: 64)")
    add("--seconds", type=float, default=5.0, metavar="S", help="length of a measurement (default: 5)")
    add("--rounds", type=count, default=3, metavar="N", help="measurements of each cell (default: 3)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the random prompts (default: 0)")
    add("--max-kl", type=float, default=0.01, metavar="X", help="nats per token that advice allows (default: 0.01)")
    add("--no-fidelity", action="store_true", help="do not measure the fidelity, as for models with random weights")
    add(
        "--out",
        type=Path,
        default=Path("comparison"),
        metavar="FOLDER",
        help="folder of the results (default: %(default)s)",
    )
    settings = parser.add_argument_group("settings of the server, as for `kvmux serve`")
    settings.add_argument("--config", type=Path, metavar="FILE", help="settings file, with instances of your own")
    for name in SERVER_FLAGS:
        settings.add_argument(flag_name(name))
    return parser


# ---------------------------------------------------------------- the run
@dataclass(frozen=True)
class Setup:
    """What is compared: the settings of the server, its strategies as they were asked for, and the plan."""

    settings: Settings
    wanted: Sequence[str]
    strategies: Mapping[str, StrategySettings]
    plan: Plan

    def instances(self) -> dict[str, dict[str, Any]]:
        """Return kind, share of the memory and options of each strategy, by name."""
        return {
            name: {"kind": each.kind, "floor": each.floor, "limit": each.limit, **each.options}
            for name, each in self.strategies.items()
        }

    def server_settings(self) -> dict[str, Any]:
        """Return the settings of servers that were given or that the plan needs, without strategies and secrets."""
        given = self.settings.model_dump(mode="json", exclude_unset=True, exclude=EXCLUDED_SETTINGS)
        size = {"max_seq_len": self.plan.context + 1, "max_num_seqs": max(self.plan.batches)}
        return given | size | {"rollouts_file": "off"}

    def format_file(self, strategy: str) -> str:
        """Return the settings file of a server with one strategy, beside the instances that every server has."""
        settings = self.server_settings() | {"default_strategy": strategy}
        return format_settings(settings) + format_tables("strategies", {strategy: self.instances()[strategy]})


def compare(options: argparse.Namespace) -> Path:
    """Measure all cells and the fidelity; return the report's path. Raises the errors that `main` prints."""
    find_tool("prometheus")
    setup = make_setup(options)
    results = Comparison(setup.plan, options.max_kl)
    lengths = [] if options.no_fidelity else setup.plan.prompt_lengths
    options.out.mkdir(parents=True, exist_ok=True)
    page: Path = options.out / REPORT
    try:
        with make_progress_bar() as bars:
            task = bars.add_task("starting", total=len(list(setup.plan.cells())) + len(lengths))

            def show_status(text: str) -> None:
                bars.update(task, description=text, completed=len(results.cells) + len(results.fidelity))

            measure_cells(setup, results, show_status)
            measured = {cell.strategy for cell in results.cells}
            wanted = [text for text in setup.wanted if parse_strategy(text)[0] in measured]
            for length in lengths:
                show_status(f"fidelity at {length:,} tokens")
                measure_fidelity(results, make_evaluate_flags(options, wanted), length)
    finally:
        if results.cells:
            page.write_text(make_page(results, describe_setup(setup)), encoding="utf-8")
            (options.out / RESULTS).write_text(json.dumps(results.as_json(), indent=2) + "\n")
    return page


def make_setup(options: argparse.Namespace) -> Setup:
    """Return what is to be compared. Raises SettingsError."""
    flags = {name: value for name in SERVER_FLAGS if (value := getattr(options, name)) is not None}
    settings = resolve_model_settings(load_settings(options.config, flags))
    wanted = options.strategies or [*list_kinds(), *MORE_STRATEGIES]
    strategies = select_strategies(settings, wanted)
    lengths, batches = sorted(set(options.prompt_tokens)), sorted(set(options.batch))
    plan = Plan(
        tuple(strategies),
        lengths,
        batches,
        max_tokens=options.max_tokens,
        seconds=options.seconds,
        rounds=options.rounds,
        seed=options.seed,
    )
    return Setup(settings, wanted, strategies, plan)


def measure_cells(setup: Setup, results: Comparison, show_status: Callable[[str], None]) -> None:
    """Measure all cells, those of each turn of a strategy on a server of its own; one that fails ends its turns.

    Raises RunError if nothing could be measured.
    """
    for (number, strategy), cells in groupby(setup.plan.cells(), attrgetter("round", "strategy")):
        if strategy in results.failures:
            continue
        show_status(f"round {number + 1}: starting {strategy}")
        try:
            measure_turn(setup, strategy, cells, results, show_status)
        except SERVER_ERRORS as error:
            results.failures[strategy] = str(error) or repr(error)
    if not results.cells:
        raise RunError(next(iter(results.failures.values())))


def measure_turn(
    setup: Setup, strategy: str, cells: Iterable[Cell], results: Comparison, show_status: Callable[[str], None]
) -> None:
    """Start a server and a Prometheus for one strategy, and measure its cells. Raises SERVER_ERRORS."""
    token = secrets.token_hex()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = folder / "kvmux.toml"
        config.write_text(setup.format_file(strategy), encoding="utf-8")
        # The settings have what the environment said; there it would beat what this plan needs
        env = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
        url = stack.enter_context(run_server(["--config", str(config), "--admin-token", token], env)).url
        scraping = make_config(url.removeprefix("http://"), SCRAPE_INTERVAL)
        prometheus = stack.enter_context(run_prometheus(folder, scraping))
        admin = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, trust_env=False)
        meter = CellMeter(stack.enter_context(admin), prometheus, setup.plan)
        for each in admin.get("/v1/kv_cache").raise_for_status().json()["data"]:
            if each["name"] == strategy and "contract" in each:
                results.exact[strategy] = each["contract"]["exact"]
        for cell in cells:
            show_status(f"round {cell.round + 1}: {strategy}, {cell.load}")
            results.cells[cell] = meter.measure(cell)


def measure_fidelity(results: Comparison, flags: Sequence[str], length: int) -> None:
    """Measure the fidelity of all strategies at a prompt length; an evaluation that fails is named in the report."""
    try:
        results.fidelity[length] = evaluate(flags, length + results.plan.max_tokens)
    except RunError as error:
        results.fidelity[length] = {}
        results.fidelity_errors[length] = str(error).strip().splitlines()[-1]


def make_evaluate_flags(options: argparse.Namespace, wanted: Sequence[str]) -> list[str]:
    """Return the flags of `kvmux evaluate` for the same model, and strategies as they were asked for."""
    flags = []
    for name in ("config", *SERVER_FLAGS):
        value = getattr(options, name)
        flags += [] if value is None else format_flag(name, value)
    for name in wanted:
        flags += format_flag("strategy", name)
    return flags


def describe_setup(setup: Setup) -> ReportSetup:
    """Return how it was measured, for the report."""
    plan = setup.plan
    # The model's path says nothing to others: its name is the first fact
    settings = {name: value for name, value in setup.server_settings().items() if name not in ("model", "model_name")}
    facts = [
        ("model", setup.settings.model_name or Path(setup.settings.model).name),
        ("kvmux", get_version()),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("machine", read_processor_name()),
        ("settings", ", ".join(f"{name}={value}" for name, value in settings.items())),
        ("answers", f"{plan.max_tokens} tokens each"),
        ("measurement", f"{plan.seconds:g} seconds or more, in each of {plan.rounds} rounds"),
        ("seed", str(plan.seed)),
    ]
    command = "make compare" + (f' ARGS="{shlex.join(sys.argv[1:])}"' if sys.argv[1:] else "")
    return ReportSetup(date.today().isoformat(), facts, command, setup.instances())


if __name__ == "__main__":
    sys.exit(main())
