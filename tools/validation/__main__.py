"""`make validate`: builds llama.cpp, computes the same GGUF files with it and with kvmux, and compares the results."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import httpx

from server.profiling.running import RunError, sigterm_as_ctrl_c
from server.version import get_version
from tools.bench.table.documents import update_section
from tools.bench.table.models import cache_folder, peers_folder
from tools.peers.installer import Installer, InstallError, parse_folder
from tools.peers.llama_cpp import INSTALLED_VERSION, LLAMA_CPP, LLAMA_CPP_VERSION, convert_model, install_llama_cpp
from tools.status_line import status_line
from tools.validation.files import FileValidation, ValidationOptions
from tools.validation.report import ValidationReport, as_json, as_text
from tools.validation.subjects import SUBJECTS, make_subject

DESCRIPTION = """\
Builds llama.cpp from source, converts the embedded model and a random one of Qwen2.5-0.5B's shape to GGUF, and computes
these files with both programs. Compared are the perplexity of a text, the log-probability of each of its tokens, and
greedy texts, under each cache strategy. What is built is kept for the next time. The exit status is 1 if a strategy
that drops and rounds nothing differs by more than 0.5 % in perplexity, or if the tokenizers differ."""

DOCUMENT, MARK = "validation.md", "make validate"
FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130  # exit statuses
MATRIX_TYPES = ("f16", "q8_0")

ShowStatus = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make validate", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="models (default: all)")
    add("--matrix-types", nargs="+", choices=MATRIX_TYPES, default=list(MATRIX_TYPES), help="GGUF files (default: all)")
    add("--texts", type=int, default=20, metavar="N", help="greedy texts (default: 20)")
    add("--max-tokens", type=int, default=64, metavar="N", help="tokens of a greedy text (default: 64)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="threads of each program (default: all processors)")
    add("--folder", type=parse_folder, default=peers_folder(), help="folder of llama.cpp (default: the user's cache)")
    add("--models", type=parse_folder, default=cache_folder(), help="folder of models (default: in the user's cache)")
    add("--pip-args", default="", help="further arguments of pip, such as an index with torch's builds for CPUs")
    add("--json", type=Path, metavar="FILE", help="write all figures to this file as JSON")
    add("--docs", type=Path, metavar="FOLDER", help=f"write the tables into {DOCUMENT} of this folder")
    options = parser.parse_args(arguments)
    if options.texts < 1 or options.max_tokens < 1 or options.threads < 1:
        parser.error("--texts, --max-tokens and --threads should be at least 1")
    if options.docs and {*options.only, *options.matrix_types} < {*SUBJECTS, *MATRIX_TYPES}:
        parser.error("--docs: the document shows all models and types; leave --only and --matrix-types out")
    with sigterm_as_ctrl_c(), status_line() as show_status:
        try:
            report = run(options, show_status)
            if options.docs:
                update_section(options.docs / DOCUMENT, MARK, as_text(report))
            if options.json:
                options.json.write_text(json.dumps(as_json(report), indent=2) + "\n")
        except (OSError, ValueError, RunError, InstallError, httpx.HTTPError) as error:
            print(f"make validate: {error}", file=sys.stderr)
            return USER_ERROR
        except KeyboardInterrupt:  # also SIGTERM; the started processes have ended by now
            return INTERRUPTED
    print(as_text(report))
    return FAILED if report.failures else 0


def run(options: argparse.Namespace, show_status: ShowStatus) -> ValidationReport:
    """Build, convert and compare what the options name. Raises InstallError, RunError and OSError."""
    date = datetime.now().astimezone()
    installer = Installer(options.folder / "llama.cpp", shlex.split(options.pip_args), show_status)
    installer.ensure(install_llama_cpp, INSTALLED_VERSION)
    how = ValidationOptions(options.texts, options.max_tokens, options.threads)
    files = []
    for name in options.only:
        subject = make_subject(name, options.models, show_status)
        for matrix_type in options.matrix_types:
            file = convert_model(installer, subject.directory, matrix_type, subject.pre_tokenizer)
            files.append(FileValidation(subject, file, matrix_type, installer.folder, how, show_status).run())
    return ValidationReport(date, get_version(), f"llama.cpp of {LLAMA_CPP} {LLAMA_CPP_VERSION}", files)


if __name__ == "__main__":
    sys.exit(main())
