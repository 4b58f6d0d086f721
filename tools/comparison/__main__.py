"""`make compare`: measures all strategies at several prompt lengths and batch sizes, and writes a report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import torch

from cache_strategies.registry import list_kinds
from config.errors import SettingsError
from config.flags import parse_count_flag as count
from config.settings import Settings, StrategySettings, load_settings
from config.sources import ENV_PREFIX
from loadtest.bench.client import ServerError
from loadtest.listing import ListingError
from server.evaluation.command import make_progress_bar, select_strategies
from server.models.files.directory import resolve_model_settings
from server.version import get_version
from tools.bench.report import read_processor_name
from tools.comparison.fidelity import evaluate
from tools.comparison.measure import SCRAPE_INTERVAL, CellMeter
from tools.comparison.plan import Plan
from tools.comparison.record import Record, RecordError
from tools.comparison.report import make_page
from tools.comparison.results import Comparison
from tools.prometheus import PromQLError, find_tool, make_config, run_prometheus
from tools.server_process import RunError, run_server, sigterm_as_ctrl_c
from tools.strategies_file import format_strategies

DESCRIPTION = """\
Starts a server with all strategies and a Prometheus that scrapes it, and loads it under one strategy after another, at
each prompt length and batch size, with the client of `kvmux bench`. Then measures by `kvmux evaluate` how far each
strategy is from exact caching. Writes report.html: which strategy suits which load, and why, with plots and all
figures. What is measured is kept in the folder --out, so the same command goes on after an interruption."""

EPILOG = """\
examples:
  make compare
  make compare ARGS="--model ~/models/llama --strategies paged paged:kv_dtype=int8 compressed:budget=0.25"
  make compare ARGS="--config kvmux.toml --prompt-tokens 4096 --batch 1 8 32 --kv-memory 4GiB"
"""

REPORT = "report.html"
RETENTION = "100y"  # of Prometheus' data: figures can be asked for again at any time
MORE_STRATEGIES = ("paged:kv_dtype=int8", "compressed:budget=0.25")  # beside every kind with its default options
SERVER_FLAGS = ("model", "dtype", "device", "threads", "weights", "kv_memory")  # settings that are flags here, too
USER_ERROR, INTERRUPTED = 2, 130  # exit statuses
USER_ERRORS = (SettingsError, RecordError, RunError, ServerError, ListingError, PromQLError, httpx.HTTPError, OSError)
# Settings of a file that do not concern a comparison: who may do what, and which requests an instance gets.
EXCLUDED_SETTINGS = {
    "strategies",
    "default_strategy",
    "rules",
    "rollouts",
    "rollouts_file",
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
            command = "the same command, without --restart," if options.restart else "the same command"
            print(f"make compare: interrupted; {command} goes on from {options.out}", file=sys.stderr)
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
    add("--restart", action="store_true", help="forget what an earlier run has measured in that folder")
    settings = parser.add_argument_group("settings of the server, as for `kvmux serve`")
    settings.add_argument("--config", type=Path, metavar="FILE", help="settings file, with instances of your own")
    for name in SERVER_FLAGS:
        settings.add_argument(f"--{name.replace('_', '-')}")
    return parser


# ---------------------------------------------------------------- the run
@dataclass(frozen=True)
class Setup:
    """What is compared: the settings of the server, its strategies as they were asked for, and the plan."""

    settings: Settings
    wanted: Sequence[str]
    strategies: Mapping[str, StrategySettings]
    plan: Plan

    def describe(self) -> dict[str, Any]:
        """Return what has to be equal for a run to go on."""
        plan = self.plan
        return {
            "model": self.settings.model,
            "versions": describe_versions(),
            "settings": self.server_settings(),
            "strategies": self.instances(),
            "prompt_tokens": list(plan.prompt_lengths),
            "batch": list(plan.batches),
            "max_tokens": plan.max_tokens,
            "seconds": plan.seconds,
            "rounds": plan.rounds,
            "seed": plan.seed,
        }

    def instances(self) -> dict[str, dict[str, Any]]:
        """Return kind, share of the memory and options of each strategy, by name."""
        return {
            name: {"kind": each.kind, "floor": each.floor, "limit": each.limit, **each.options}
            for name, each in self.strategies.items()
        }

    def server_settings(self) -> dict[str, Any]:
        """Return the settings of the server that were given or that the plan needs, without strategies and secrets."""
        given = self.settings.model_dump(mode="json", exclude_unset=True, exclude=EXCLUDED_SETTINGS)
        size = {"max_seq_len": self.plan.context + 1, "max_num_seqs": max(self.plan.batches)}
        return given | size | {"default_strategy": next(iter(self.strategies)), "rollouts_file": "off"}


def compare(options: argparse.Namespace) -> Path:
    """Measure what is not measured yet; return the report's path. Raises the errors that `main` prints."""
    find_tool("prometheus")
    setup = make_setup(options)
    record = Record.open(options.out, setup.describe(), restart=options.restart)
    page: Path = options.out / REPORT
    lengths = [] if options.no_fidelity else [n for n in setup.plan.prompt_lengths if record.lacks_fidelity(n)]
    with make_progress_bar() as bars:
        num_cells = len(list(setup.plan.cells()))
        task = bars.add_task("starting", total=num_cells + len(lengths))

        def show_status(text: str) -> None:
            bars.update(task, description=text)

        try:
            for done in iter_measured(setup, record, options.out, show_status):
                bars.update(task, completed=done)
            for length in lengths:
                show_status(f"fidelity at {length:,} tokens")
                total = length + setup.plan.max_tokens
                record.set_fidelity(length, evaluate(make_evaluate_flags(options, setup), total))
                bars.advance(task)
        finally:
            if record.results:
                page.write_text(make_page(make_results(setup, record, options)), encoding="utf-8")
    return page


def make_setup(options: argparse.Namespace) -> Setup:
    """Return what is to be compared. Raises SettingsError."""
    flags = {name: value for name in SERVER_FLAGS if (value := getattr(options, name)) is not None}
    settings = resolve_model_settings(load_settings(options.config, flags))
    wanted = options.strategies or [*list_kinds(), *MORE_STRATEGIES]
    strategies = select_strategies(settings, wanted)
    lengths, batches = sorted(set(options.prompt_tokens)), sorted(set(options.batch))
    size = options.max_tokens, options.seconds, options.rounds, options.seed
    plan = Plan(tuple(strategies), lengths, batches, *size)
    return Setup(settings, wanted, strategies, plan)


def iter_measured(setup: Setup, record: Record, out: Path, show_status: Callable[[str], None]) -> Iterator[int]:
    """Measure all cells that are not in the record; yield the number of cells in it after each."""
    cells = list(setup.plan.cells())
    left = [cell for cell in cells if cell not in record.results]
    yield len(cells) - len(left)
    if not left:
        return
    folder = out / "prometheus"
    folder.mkdir(exist_ok=True)
    token = secrets.token_hex()
    config = out / "kvmux.toml"
    config.write_text(format_settings(setup.server_settings()) + format_strategies(setup.instances()))
    with ExitStack() as stack:
        show_status("starting the server")
        # The settings have what the environment said; there it would beat what this plan needs
        env = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
        url = stack.enter_context(run_server(["--config", str(config), "--admin-token", token], env)).url
        target = url.removeprefix("http://")
        scraping = make_config(target, SCRAPE_INTERVAL)
        prometheus = stack.enter_context(
            run_prometheus(folder, scraping, [f"--storage.tsdb.retention.time={RETENTION}"])
        )
        admin = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, trust_env=False)
        meter = CellMeter(stack.enter_context(admin), prometheus, setup.plan)
        listed = admin.get("/v1/kv_cache").raise_for_status().json()["data"]
        record.set_exact({each["name"]: each["contract"]["exact"] for each in listed if "contract" in each})
        for cell in left:
            show_status(f"round {cell.round + 1}: {cell.load}, {cell.strategy}")
            record.add(meter.measure(cell))
            yield len(record.results)


def format_settings(settings: Mapping[str, Any]) -> str:
    """Return settings as lines of a TOML file."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items() if value is not None)


def make_evaluate_flags(options: argparse.Namespace, setup: Setup) -> list[str]:
    """Return the flags of `kvmux evaluate` for the same model and strategies."""
    flags = []
    for name in ("config", *SERVER_FLAGS):
        value = getattr(options, name)
        flags += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    for name in setup.wanted:
        flags += ["--strategy", name]
    return flags


def make_results(setup: Setup, record: Record, options: argparse.Namespace) -> Comparison:
    """Return the results for the report."""
    plan = setup.plan
    facts = [
        ("model", setup.settings.model_name or Path(setup.settings.model).name),
        *describe_versions().items(),
        ("machine", read_processor_name()),
        ("settings", ", ".join(f"{name}={value}" for name, value in setup.server_settings().items())),
        ("answers", f"{plan.max_tokens} tokens each"),
        ("measurement", f"{plan.seconds:g} seconds or more, in each of {plan.rounds} rounds"),
        ("seed", str(plan.seed)),
    ]
    command = "make compare" + (f' ARGS="{shlex.join(sys.argv[1:])}"' if sys.argv[1:] else "")
    date = datetime.now().astimezone()
    return Comparison(plan, record, date, options.max_kl, facts, [command], setup.instances())


def describe_versions() -> dict[str, str]:
    """Return the versions on which figures depend, by name."""
    return {"kvmux": get_version(), "torch": torch.__version__, "Python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main())
