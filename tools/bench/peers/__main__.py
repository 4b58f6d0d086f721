"""`make bench-peers`: installs other servers and measures them and kvmux by turns, with one model and one client."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from tools.bench.peers.gguf_files import OUR_KV_MIB, measure_files
from tools.bench.peers.gguf_files import as_text as files_as_text
from tools.bench.peers.measure import measure_decoding, measure_servers
from tools.bench.peers.report import PeerReport, as_json, as_text, read_measurements
from tools.bench.peers.servers import prepare_kvmux, prepare_llama_cpp, prepare_vllm
from tools.bench.peers.workloads import DEFAULT_WORKLOADS, WORKLOADS
from tools.bench.table.documents import BENCHMARKS, update_section
from tools.bench.table.models import QWEN, cache_folder, make_model, peers_folder
from tools.peers.installer import Installer, InstallError, parse_folder
from tools.peers.programs import ServerProgram
from tools.real_models import REAL_MODELS
from tools.server_process import RunError, sigterm_as_ctrl_c
from tools.status_line import status_line

DESCRIPTION = """\
Installs llama.cpp (built from source) and vLLM (its build for CPUs), each in a folder and an environment of its own,
and measures them and `kvmux serve` over HTTP: one at a time, by turns, with the same requests to a model of
Qwen2.5-0.5B's shape with random weights, in bfloat16. Beside each figure stands its share of the machine's limit,
measured just before. What is installed is kept for the next time."""

GGUF_ROWS = "gguf"
MARKED = "make bench-peers"  # the section of the document
FAILED, INTERRUPTED = 2, 130  # exit statuses

Prepare = Callable[[Path, Installer], ServerProgram]
PEERS: Mapping[str, Prepare] = {"llama.cpp": prepare_llama_cpp, "vllm": prepare_vllm}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-peers", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peers", nargs="*", choices=tuple(PEERS), default=list(PEERS), help="servers beside kvmux (default: all)")
    add(
        "--rows",
        nargs="+",
        choices=(*WORKLOADS, GGUF_ROWS),
        default=list(DEFAULT_WORKLOADS),
        help=f"workloads of `kvmux bench` (default: {' '.join(DEFAULT_WORKLOADS)}); or {GGUF_ROWS}: the real models of "
        "`make models`, beside llama.cpp",
    )
    add("--turns", type=int, default=2, help="times that each server is started and measured (default: 2)")
    add(
        "--decode-turns",
        type=int,
        default=0,
        metavar="N",
        help="further turns of the rows between two tokens, after prompts that servers find cached (default: none)",
    )
    add("--earlier", type=Path, metavar="FILE", help="JSON of an earlier run on this machine, whose turns are added")
    add("--folder", type=parse_folder, default=peers_folder(), help="folder of servers (default: in the user's cache)")
    add("--models", type=parse_folder, default=cache_folder(), help="folder of models (default: in the user's cache)")
    add("--pip-args", default="", help="further arguments of pip, such as an index with torch's builds for CPUs")
    add("--json", type=Path, metavar="FILE", help="write all measurements to this file as JSON")
    add("--docs", type=Path, metavar="FOLDER", help=f"write the tables into {BENCHMARKS} of this folder")
    options = parser.parse_args(arguments)
    if min(options.turns, options.decode_turns) < 0 or not options.turns + options.decode_turns:
        parser.error("--turns and --decode-turns should be at least 0, and one of them at least 1")
    if options.docs and (set(options.peers) < PEERS.keys() or not set(DEFAULT_WORKLOADS) <= set(options.rows)):
        parser.error("--docs: the document shows all servers and rows; leave --peers and --rows out")
    if GGUF_ROWS in options.rows and len(options.rows) > 1:
        parser.error(f"--rows: {GGUF_ROWS} has tables of its own; give it alone")
    with sigterm_as_ctrl_c(), status_line() as show_status:
        try:
            if GGUF_ROWS in options.rows:
                print(measure_real_models(options, show_status))
                return 0
            report = run(options, show_status)
            if options.docs and report.complete:
                update_section(options.docs / BENCHMARKS, MARKED, as_text(report))
        except (OSError, ValueError, RunError, InstallError) as error:
            print(f"make bench-peers: {error}", file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:  # also SIGTERM; the started processes have ended by now
            return INTERRUPTED
    print(as_text(report))
    if options.json:
        options.json.write_text(json.dumps(as_json(report), indent=2) + "\n")
    return 0 if report.complete else INTERRUPTED


def measure_real_models(options: argparse.Namespace, show_status: Callable[[str], None]) -> str:
    """Return the tables of real GGUF files on kvmux and llama.cpp. Raises OSError, RunError and InstallError."""
    files = [model.path for model in REAL_MODELS.values() if model.path.exists()]
    if not files:
        raise OSError("there is no real model: `make models` fetches them")
    installer = Installer(options.folder / "llama.cpp", shlex.split(options.pip_args), show_status)
    programs: dict[str, Callable[[Path], ServerProgram]] = {
        "kvmux": lambda file: prepare_kvmux(file, f"{OUR_KV_MIB}MiB"),
        "llama.cpp": lambda file: prepare_llama_cpp(file, installer),
    }
    reports = list(measure_files(files, programs, options.turns, show_status))
    return files_as_text(reports, [make(files[-1]) for make in programs.values()])


def run(options: argparse.Namespace, show_status: Callable[[str], None]) -> PeerReport:
    """Install and measure what the options name; Ctrl-C ends it with what was measured so far.

    Raises OSError, and ValueError for an earlier report of another machine.
    """
    date = datetime.now().astimezone()
    earlier = read_measurements(json.loads(options.earlier.read_text())) if options.earlier else []
    turns = max((each.turn for each in earlier), default=0)
    model = make_model(QWEN, options.models, show_status)
    programs, missing = [prepare_kvmux(model)], dict[str, str]()
    for name in options.peers:
        try:
            installer = Installer(options.folder / name, shlex.split(options.pip_args), show_status)
            programs.append(PEERS[name](model, installer))
        except InstallError as error:
            missing[name] = str(error)
    workloads = [name for name in WORKLOADS if name in options.rows]
    measurements, complete = earlier, False
    try:
        for measurement in measure_servers(programs, workloads, options.turns, show_status):
            measurements.append(replace(measurement, turn=turns + measurement.turn))
        turns += options.turns
        decoded = workloads if options.decode_turns else []
        for measurement in measure_decoding(programs, decoded, options.decode_turns, show_status):
            measurements.append(replace(measurement, turn=turns + measurement.turn))
        complete = True
    except KeyboardInterrupt:  # also SIGTERM
        if not measurements:
            raise
    turns = max(each.turn for each in measurements)
    return PeerReport(date, turns, workloads, programs, missing, measurements, complete)


if __name__ == "__main__":
    sys.exit(main())
