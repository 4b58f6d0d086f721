"""`python -m tools.bench [GROUP]`: measures a group of cases, by default the rows of `make bench`.

This module parses the command line and publishes the report. Each group is a module of this folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from importlib import import_module
from pathlib import Path

from tools.bench.report import Report, as_json, as_text, read_samples, update_section
from tools.bench.runner import CASE_ERRORS, Context, Effort, Group, Sample, run_cases
from tools.peers.installer import InstallError
from tools.server_process import sigterm_as_ctrl_c
from tools.status_line import status_line

DEFAULT_GROUP = "rows"
GROUPS = {
    "rows": "what `make bench` measures: kvmux over HTTP beside goals, peers and the limits of this machine",
    "growth": "a decode step of every strategy by context and streams, and the calls that must not grow",
    "decoding": "decode steps under any cache strategies",
    "kernels": "every operation beside the speed of the memory",
    "compression": "what each scorer costs in quality",
    "weights": "what quantized weights cost in quality",
    "grammars": "what grammars cost a token and a batch",
    "replicas": "several replicas on Ray Serve beside round robin and one server",
    "peers": "llama.cpp and vLLM, which are installed, beside kvmux",
    "gguf_files": "real GGUF files on kvmux and llama.cpp",
    "gguf_types": "one model in every type of GGUF file",
    "kv_formats": "what formats of keys and values cost in quality, on kvmux and llama.cpp",
    "checkouts": "two versions of the code",
    "validation": "what kvmux computes beside what llama.cpp computes",
}
MODULES = {"validation": "tools.validation.cases"}  # of groups that are not modules of this folder
MISSED, FAILED, INTERRUPTED = 1, 2, 130  # exit statuses; 130 is what shells use for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given.pop(0) if given and given[0] in GROUPS else DEFAULT_GROUP
    group: Group = import_module(MODULES.get(name, f"tools.bench.{name}")).GROUP
    command = group.command or f"python -m tools.bench {name}"
    parser = make_parser(group, command)
    options = parser.parse_args(given)
    check_options(parser, group, options)
    report = Report(datetime.now().astimezone())
    with sigterm_as_ctrl_c(), status_line() as show_status:
        context = Context(options, show_status)
        try:
            status = measure(group, context, report)
            report.notes = context.notes
            report.samples.sort(key=group.order)
            if options.docs and status == 0:
                update_section(options.docs / str(group.document), command, as_text(report))
                group.update_more(context)
            elif options.docs:
                context.notes.append("the document was not changed, as something is missing")
        except (*CASE_ERRORS, ValueError, InstallError) as error:
            print(f"{command}: {error}", file=sys.stderr)
            return FAILED
    if not report.samples and not report.failures:
        return status
    print(as_text(report))
    if options.json:
        options.json.write_text(json.dumps(as_json(report), indent=2) + "\n")
    if group.draw is not None and options.plot:
        group.draw(report.samples, options.plot)
    return MISSED if status == 0 and group.goals_are_bounds and report.missed else status


def make_parser(group: Group, command: str) -> argparse.ArgumentParser:
    groups = "\n".join(f"  {name:12} {what}" for name, what in GROUPS.items())
    parser = argparse.ArgumentParser(
        prog=command,
        description=group.description,
        epilog=f"groups of `python -m tools.bench GROUP`:\n{groups}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, usual = parser.add_argument, group.effort
    add("--turns", "--rounds", type=int, default=usual.turns, help=f"turns of each variant (default: {usual.turns})")
    attempts = f"attempts at a measurement while other processes run (default: {usual.attempts})"
    add("--attempts", type=int, default=usual.attempts, help=attempts)
    add("--json", type=Path, metavar="FILE", help="write all measurements to this file as JSON")
    add("--earlier", type=Path, metavar="FILE", help="JSON of an earlier run on this machine, whose turns are added")
    docs = f"write the tables into {group.document} of this folder" if group.document else argparse.SUPPRESS
    add("--docs", type=Path, metavar="FOLDER", help=docs)
    if group.draw is not None:
        add("--plot", type=Path, metavar="FILE", help="plot the figures to this file; needs kvmux[evaluate]")
    group.add_arguments(parser)
    return parser


def check_options(parser: argparse.ArgumentParser, group: Group, options: argparse.Namespace) -> None:
    """End the program with a message if an option does not fit."""
    if min(options.turns, options.attempts) < 1:
        parser.error("--turns (--rounds) and --attempts should be at least 1")
    parts = [name for name in group.parts if getattr(options, name) != parser.get_default(name)]
    if options.docs and (parts or group.document is None):
        names = " and ".join(f"--{name}" for name in parts) or "--docs"
        parser.error(f"--docs: the document shows everything; leave {names} out")


def measure(group: Group, context: Context, report: Report) -> int:
    """Run the cases of a group and add what is measured to a report; return the exit status.

    Ctrl-C and SIGTERM end it with what was measured so far; the processes that were started have ended by then.
    """
    options = context.options
    if options.earlier:
        report.samples = read_samples(json.loads(options.earlier.read_text()))
    turns = report.num_turns
    cases = group.list_cases(context)
    try:
        for result in run_cases(cases, Effort(options.turns, options.attempts), context.show_status):
            report.add(replace(result, turn=turns + result.turn) if isinstance(result, Sample) else result)
    except KeyboardInterrupt:
        context.notes.append("interrupted: some rows were not measured, or in fewer turns")
        return INTERRUPTED
    return FAILED if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
