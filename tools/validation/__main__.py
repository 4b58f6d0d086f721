"""`make validate`: computes the same GGUF files with llama.cpp and with kvmux, and compares the results."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import httpx

from server.version import get_version
from tools.bench.table.documents import update_section
from tools.bench.table.models import peers_folder
from tools.peers.installer import Installer, InstallError, parse_folder
from tools.peers.llama_cpp import INSTALLED_VERSION, LLAMA_CPP, LLAMA_CPP_VERSION, install_llama_cpp
from tools.server_process import RunError, sigterm_as_ctrl_c
from tools.status_line import status_line
from tools.validation.files import DTYPES, FileValidation, ValidationOptions
from tools.validation.kvmux import list_strategies
from tools.validation.llama_cpp import get_llama_cpp_version
from tools.validation.report import ValidationReport, as_json, as_text
from tools.validation.subjects import SUBJECTS, is_there, make_subject

DESCRIPTION = """\
Computes the embedded model and the real models that `make models` has fetched with kvmux and with llama.cpp, which the
package xllamacpp has as a library. Compared are log-probabilities, greedy texts and tokens, under each cache strategy.
The exit status is 1 if a strategy that drops and rounds nothing differs by more than its number format explains
(docs/laboratory/validation.md), or if the tokenizers differ."""

HELP_PERPLEXITY = "predict with llama-perplexity, which is built from source once; that takes about 20 minutes"
DOCUMENT, MARK = "validation.md", "make validate"
FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130  # exit statuses

ShowStatus = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make validate", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="models (default: all that are there)")
    add("--strategies", nargs="+", choices=list_strategies(), default=[], help="strategies (default: all)")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="number formats of kvmux (default: all)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="threads of each program (default: all processors)")
    add("--perplexity", action="store_true", help=HELP_PERPLEXITY)
    add("--folder", type=parse_folder, default=peers_folder(), help="folder of that llama.cpp (default: user's cache)")
    add("--pip-args", default="", help="further arguments of pip, such as an index with torch's builds for CPUs")
    add("--json", type=Path, metavar="FILE", help="write all figures to this file as JSON")
    add("--docs", type=Path, metavar="FOLDER", help=f"write the tables into {DOCUMENT} of this folder")
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error("--threads should be at least 1")
    if options.docs and (options.strategies or {*options.only, *options.dtypes} < {*SUBJECTS, *DTYPES}):
        parser.error("--docs: the document shows everything; leave --only, --strategies and --dtypes out")
    with sigterm_as_ctrl_c(), status_line() as show_status:
        try:
            report = run(options, show_status)
        except (OSError, ValueError, RunError, InstallError, httpx.HTTPError) as error:
            print(f"make validate: {error}", file=sys.stderr)
            return USER_ERROR
        except KeyboardInterrupt:  # also SIGTERM; the started processes have ended by now
            return INTERRUPTED
    return publish(report, options.docs, options.json)


def publish(report: ValidationReport, docs: Path | None, json_file: Path | None) -> int:
    """Print a report, write it into the document of `docs` and as JSON; return the exit status."""
    print(text := as_text(report))
    try:
        if docs:
            update_section(docs / DOCUMENT, MARK, text)
        if json_file:
            json_file.write_text(json.dumps(as_json(report), indent=2) + "\n")
    except (OSError, ValueError) as error:
        print(f"make validate: {error}", file=sys.stderr)
        return USER_ERROR
    return FAILED if report.failures else 0


def run(options: argparse.Namespace, show_status: ShowStatus) -> ValidationReport:
    """Compare what the options name; models that are not there are left out. Raises InstallError, RunError, OSError."""
    date = datetime.now().astimezone()
    installer = Installer(options.folder / "llama.cpp", shlex.split(options.pip_args), show_status)
    version = get_llama_cpp_version()
    if options.perplexity:
        installer.ensure(install_llama_cpp, INSTALLED_VERSION)
        version += f" (perplexity: {LLAMA_CPP} {LLAMA_CPP_VERSION})"
    native = installer.folder if options.perplexity else None
    missing = [name for name in options.only if not is_there(name)]
    if len(missing) == len(options.only):
        raise RunError(f"none of these models is there: make models MODELS={missing[0]}")
    how = ValidationOptions(options.threads, options.dtypes, options.strategies, native=native)
    with tempfile.TemporaryDirectory() as folder:
        subjects = [make_subject(name, Path(folder)) for name in options.only if name not in missing]
        files, failed = [], []
        for subject in subjects:
            try:
                files.append(FileValidation(subject, how, show_status).run())
            except (OSError, ValueError, RunError, httpx.HTTPError) as error:  # what was computed is worth keeping
                failed.append(f"{subject.name} was not computed: {error}")
    return ValidationReport(date, get_version(), f"llama.cpp of {version}", files, missing, failed)


if __name__ == "__main__":
    sys.exit(main())
