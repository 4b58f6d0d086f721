"""The command line: `kvmux serve`, `health`, `bench`, `evaluate`, `profile`, `doctor`, and their help.

`flags.py` makes the flags of settings; `strategy.py` and `ray_flags.py` have `kvmux strategy` and `kvmux ray`. Imports
neither torch nor transformers, so that help and errors come at once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import multiprocessing
import pkgutil
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import server
from config.errors import SettingsError, format_error
from config.flags import add_flags
from config.quantities import parse_duration_flag
from config.settings import MIN_API_KEY_LENGTH, Settings, group_settings, load_settings
from loadtest.bench import flags as bench_flags
from server.cli.flags import add_settings, pop_settings_file
from server.cli.health import TIMEOUT, check_health
from server.cli.parser import Commands, Parser, add_command, import_later
from server.cli.ray_flags import add_ray
from server.cli.standard_streams import open_missing_streams, print_safely, redirect_to_devnull
from server.cli.strategy import add_strategy
from server.evaluation import flags as evaluation_flags
from server.evaluation.board.data import check_board_file
from server.listening import ListenError, get_url, listen
from server.logs import configure_logging, escape_unprintable, fields
from server.models.files.directory import resolve_model_settings
from server.processes.child_process import USER_ERROR
from server.processes.supervisor import Supervisor
from server.profiling import flags as profiling_flags
from server.version import get_version

log = logging.getLogger(__name__)

MIN_OPEN_FILES = 64

# Settings of the commands that run a model without serving it.
COMMON = ("model", "revision", "allow_symlinks", "model_impl", "device", "dtype", "weights", "kernels", "threads")
EVALUATION_SETTINGS = (*COMMON, "kv_memory", "max_num_batched_tokens")
PROFILE_SETTINGS = (*EVALUATION_SETTINGS, "max_num_seqs", "max_seq_len", "admin_token")

DESCRIPTION = """\
An inference server where the KV cache is a plug-in: a strategy per request, all strategies in one batch."""

SERVE_DESCRIPTION = """\
Loads a model and serves it with the OpenAI API (/v1/completions, /v1/models, ...).
Without any setting it serves the small embedded model on http://127.0.0.1:8000.

A setting on the command line beats its environment variable, which beats the settings file,
which beats the default."""

SERVE_EPILOG = """\
strategies and rules are tables of the settings file:

  # kvmux.toml: kvmux serve --config kvmux.toml
  model = "models/my-model"
  kv_memory = "2GiB"
  default_strategy = "paged"

  [strategies.paged]          # built-in instances: paged, contiguous, sliding_window
  floor = "25%"               # KV memory that no other instance may take
  limit = "75%"               # KV memory it may hold at most

  [strategies.short]          # an instance of your own: a kind, and options of that kind
  kind = "sliding_window"
  window = 256

  [[rules]]                   # for requests that name no strategy; the first rule that matches counts
  use = "short"
  min_prompt_tokens = 1024

A client names an instance in the request ("kv_cache": "short") or in the model's name ("my-model:short").
A variable can set one option: KVMUX_STRATEGIES__SHORT__WINDOW=512

examples:
  kvmux serve
  kvmux serve models/my-model.gguf
  kvmux serve --model models/my-model --port 9000 --kv-memory 2GiB
  KVMUX_MODEL=models/my-model kvmux serve --device cpu --threads 8
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments (default: those of the process) name; return the exit code."""
    open_missing_streams()
    parser = _make_parser()
    try:
        options = vars(parser.parse_args(arguments))
        run = options.pop("run", None)
        if run is None:
            parser.print_help(sys.stderr)
            return USER_ERROR
        return int(run(options))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the program that reads the output, such as `head`, has ended
        redirect_to_devnull(sys.stdout)
        return 1
    except (SettingsError, ListenError, OSError) as error:
        print_safely(f"kvmux: {escape_unprintable(format_error(error))}", sys.stderr)
        return USER_ERROR


# ---------------------------------------------------------------- kvmux serve
def serve(options: dict[str, Any]) -> int:
    """Serve until a signal stops the server; `options` are the values of the flags given. Return the exit code."""
    if (model := options.pop("model_argument", None)) is not None and options.setdefault("model", model) != model:
        raise SettingsError(f"two models are given, {model} and --model {options['model']}; remove one of them")
    settings = load_settings(pop_settings_file(options), options)
    multiprocessing.current_process().name = "kvmux"  # in the log
    configure_logging(settings)
    try:
        check_kernels_package()
        check_open_files()
        check_api_keys(settings)
        if settings.board is not None:
            check_board_file(Path(settings.board))  # before a model is loaded
        with contextlib.ExitStack() as sockets:
            listener = sockets.enter_context(listen(settings.host, settings.port))
            if settings.metrics_port is None:
                return _run_supervisor(settings, listener)
            host = settings.metrics_host or settings.host
            metrics = sockets.enter_context(listen(host, settings.metrics_port, "metrics-"))
            return _run_supervisor(settings, listener, metrics)
    except (SettingsError, ListenError, OSError) as error:
        if settings.log_format == "text":
            raise
        log.error("%s", format_error(error))
        return USER_ERROR


def _run_supervisor(settings: Settings, listener: socket.socket, metrics_listener: socket.socket | None = None) -> int:
    """Run the supervisor; announce the server on stdout, or in the log if its format is JSON."""
    url, in_log = get_url(listener), settings.log_format == "json"
    loads = f"kvmux {get_version()} loads {settings.model}"
    if in_log:
        log.info(loads)
    else:
        print_safely(f"{loads} ...", sys.stdout)
    if metrics_listener is not None:
        log.info("metrics are on %s/metrics", get_url(metrics_listener))
    settings = resolve_model_settings(settings)

    def announce(ready: Mapping[str, Any]) -> None:
        serves = f"kvmux {get_version()} serves {ready['model']} on {url}"
        if in_log:
            log.info(serves, extra=fields(url=url, **ready))
        else:
            # imported by name, as it needs jinja, and help and errors do not
            print_safely(pkgutil.resolve_name("server.cli.banner:format_banner")(url, settings, ready), sys.stdout)

    return Supervisor(settings, listener, announce, metrics_listener=metrics_listener).run()


def check_open_files() -> None:
    """Raise SettingsError if the system allows a process fewer than MIN_OPEN_FILES open files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < MIN_OPEN_FILES:
        raise SettingsError(
            f"a process may open {most} files here, and the server needs {MIN_OPEN_FILES} and one for each "
            "connection: raise the limit (ulimit -n)"
        )


def check_kernels_package() -> None:
    """Raise SettingsError if `import kernels` finds Hugging Face's package of that name, not this project's folder."""
    ours = Path(server.__file__).parent.parent
    spec = importlib.util.find_spec("kernels")
    if spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ours / "kernels"):
        raise SettingsError("`import kernels` finds another package of that name; remove it: pip uninstall kernels")
    try:
        metadata.distribution("kernels")
    except metadata.PackageNotFoundError:
        return
    log.warning(
        "a package `kernels` is installed, which is not this project's folder of that name: pip uninstall kernels"
    )


def check_api_keys(settings: Settings) -> None:
    """Warn about API keys that are short enough to be guessed, without logging them."""
    if settings.short_api_keys:
        which = ", ".join(map(str, settings.short_api_keys))
        log.warning("api_keys: keys of fewer than %d characters may be guessed: number %s", MIN_API_KEY_LENGTH, which)


def profile(options: dict[str, Any]) -> int:
    """Measure model steps in this process or, with --url, in a running server."""
    if "url" in options:
        return import_later("server.profiling.remote:run")(options)
    return import_later("server.profiling.command:run", check_kernels_package)(options)


# ---------------------------------------------------------------- the parser
def _make_parser() -> Parser:
    parser = Parser(prog="kvmux", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"kvmux {get_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (_add_serve, _add_health, _add_bench, _add_evaluate, _add_profile, _add_doctor, add_strategy, add_ray):
        add(commands)
    return parser


def _add_serve(commands: Commands) -> None:
    parser = add_command(
        commands,
        "serve",
        serve,
        "[MODEL] [--port N] [--config FILE] [more settings]",
        help="load a model and serve it; `kvmux serve --help` lists every setting",
        description=SERVE_DESCRIPTION,
        epilog=SERVE_EPILOG,
    )
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="the same as --model MODEL")
    add_settings(parser, group_settings())


def _add_health(commands: Commands) -> None:
    parser = add_command(
        commands,
        "health",
        lambda options: check_health(**options),
        "[--url URL] [--timeout DURATION]",
        help="check whether the servers on this machine are ready",
        description="Requests /ready of the servers that you run on this machine, wherever they listen.\n"
        "The exit code is 0 if there is at least one and all are ready, else 1.",
    )
    parser.add_argument("--url", help="check the server at this URL instead")
    parser.add_argument(
        "--timeout",
        type=parse_duration_flag,
        metavar="DURATION",
        help=f"time to wait for a response, in seconds or as 500ms or 10s (default: {TIMEOUT:g})",
    )


def _add_bench(commands: Commands) -> None:
    parser = add_command(
        commands,
        "bench",
        import_later("loadtest.bench.command:run"),
        "[--url URL] [--workload NAME ...] [--strategies NAME ...] [more flags]",
        help="benchmark a running server under each cache strategy",
        description=bench_flags.DESCRIPTION,
        epilog=bench_flags.EPILOG,
    )
    bench_flags.add_bench_flags(parser)


def _add_evaluate(commands: Commands) -> None:
    parser = add_command(
        commands,
        "evaluate",
        import_later("server.evaluation.command:run", check_kernels_package),
        "[--model MODEL] [--strategy NAME ...] [--text FILE] [more flags]",
        help="measure how much quality each cache strategy costs",
        description=evaluation_flags.DESCRIPTION,
        epilog=evaluation_flags.EPILOG,
    )
    add_flags(parser, "evaluation", evaluation_flags.EvaluateOptions)
    add_settings(parser, {"settings": EVALUATION_SETTINGS})


def _add_profile(commands: Commands) -> None:
    parser = add_command(
        commands,
        "profile",
        profile,
        "[--model MODEL | --url URL] [--sequences N ...] [--context N] [more flags]",
        help="show where the time of a model step goes, compared with the limits of this machine",
        description=profiling_flags.DESCRIPTION,
        epilog=profiling_flags.EPILOG,
    )
    profiling_flags.add_profile_flags(parser)
    add_settings(parser, {"settings": PROFILE_SETTINGS})


def _add_doctor(commands: Commands) -> None:
    parser = add_command(
        commands,
        "doctor",
        import_later("server.cli.doctor:doctor", check_kernels_package),
        "[--out FILE] [--model MODEL]",
        help="report on this machine and on whether its kernels compute correctly, or on how a model would run here",
        description="Prints a report on this machine and its kernels, and writes it to a file\n"
        "to attach to a bug report. With --model it says how a model would run here,\n"
        "and what memory its texts take, without loading it.",
    )
    parser.add_argument(
        "--model", help="directory of a model, its name on the hub, or a GGUF file: report on this model instead"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the report to this file (default: kvmux-doctor.json)"
    )
