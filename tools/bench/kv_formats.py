"""Measures what formats of keys and values cost in quality, on kvmux and llama.cpp: `python -m tools.bench kv_formats`.

Both programs compute the same tokens of the same file, and each is compared with itself: with keys and values as it
computes them (kvmux), or in float16 (llama.cpp). llama.cpp rounds activations to 8 bits, so that the least difference
grows: float16 without flash attention, which only adds in another order, shows how much of a figure that is.
"""

from __future__ import annotations

import json
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer

from server.evaluation.documents import find_special_tokens, read_text_file
from server.models.files.directory import locate
from server.models.load import read_model_info
from tools.bench.peers import add_folder_arguments, make_installer
from tools.bench.runner import Case, Context, Effort, Group, Reading, Row, Table
from tools.peers.installer import Installer
from tools.peers.llama_cpp import INSTALLED_VERSION, install_llama_cpp
from tools.real_models import REAL_MODELS
from tools.server_process import RunError, run_module

OURS, THEIRS = "kvmux", "llama.cpp"
KVMUX: Mapping[str, str] = {
    "int8": "paged:k_dtype=int8,v_dtype=int8",
    "int8, int4": "paged:k_dtype=int8,v_dtype=int4",
    "int4": "paged:k_dtype=int4,v_dtype=int4",
    "int4, not centered": "paged:k_dtype=int4,v_dtype=int4,center=false",
    "int4, neither centered nor rotated": "paged:k_dtype=int4,v_dtype=int4,center=false,hadamard=false",
}
LLAMA_CPP: Mapping[str, str] = {
    "q8_0": "q8_0/q8_0",
    "q8_0, q4_0": "q8_0/q4_0",
    "q4_0": "q4_0/q4_0",
    "q4_0, not rotated": "q4_0/q4_0/plain",
    "float16, without flash attention": "f16/f16/slow",
}
# Formats of kvmux: (format of llama.cpp, share of its divergence that is the most allowed)
GOALS: Mapping[str, tuple[str, float]] = {"int8": ("q8_0", 1), "int8, int4": ("q4_0", 0.5), "int4": ("q4_0", 1)}


@dataclass(frozen=True)
class FormatTexts:
    """A text of some length for a model, and what has been measured of it."""

    model: str
    text: Path
    length: int
    options: Namespace
    installer: Installer
    ids: Path  # JSON with the text's tokens
    theirs: dict[str, float] = field(default_factory=dict)  # KL by format of llama.cpp


def add_arguments(parser: ArgumentParser) -> None:
    add, there = parser.add_argument, [str(model.path) for model in REAL_MODELS.values() if model.path.exists()]
    add("--model", nargs="+", default=there, help="GGUF files (default: those that `make models` has fetched)")
    add("--programs", nargs="+", choices=(THEIRS, OURS), default=[THEIRS, OURS], help="(default: both)")
    names = [*KVMUX, *LLAMA_CPP]
    add("--formats", nargs="+", choices=names, metavar="FORMAT", default=names, help=f"of: {'; '.join(names)}")
    add("--text", nargs="+", type=Path, required=True, help="files of text, of which the beginning is read")
    add("--lengths", nargs="+", type=int, default=[1024, 4096, 8192], help="tokens that are read")
    add("--last", type=int, default=256, help="last tokens, which count")
    add("--threads", type=int, default=2, help="threads of each program")
    add("--dtype", default="float32", help="of kvmux (default: float32)")
    add("--weights", default="auto", help="of kvmux (default: as they are stored; f32 rounds no activations)")
    add("--kernels", default="auto", help="of kvmux")
    add_folder_arguments(parser)


def list_cases(context: Context) -> Iterator[Case]:
    """Yield a case for each model, text and length that its context has room for. Raises OSError and InstallError."""
    options, installer = context.options, make_installer(context, THEIRS)
    if THEIRS in options.programs:
        installer.ensure(install_llama_cpp, INSTALLED_VERSION)
    for model in options.model:
        room = read_model_info(locate(model), "auto").max_positions
        for length, text in product((each for each in options.lengths if each <= room), options.text):
            title = f"{Path(model).stem}, {text.stem}, {length:,} tokens"
            set_up = partial(_prepare, model, text, length, options, installer)
            table = Table(title, variants_are_rows=True)
            yield Case(title, table, _measure, options.programs, set_up, max_turns=1, is_timed=False)


@contextmanager
def _prepare(model: str, text: Path, length: int, options: Namespace, installer: Installer) -> Iterator[FormatTexts]:
    """Yield a text as tokens. Raises RunError if it is too short."""
    directory = locate(model)
    tokenizer, info = Tokenizer.from_file(str(directory / "tokenizer.json")), read_model_info(directory, "auto")
    marks = find_special_tokens(tokenizer, info.eos_ids, info.vocab_size)
    document = read_text_file(tokenizer, marks, length, 1, text)[0]
    if len(document.ids) <= length:
        raise RunError(f"{text} has {len(document.ids):,} tokens only")
    with tempfile.TemporaryDirectory() as folder:
        ids = Path(folder) / "ids.json"
        ids.write_text(json.dumps(document.ids[:length]))
        yield FormatTexts(model, text, length, options, installer, ids)


def _measure(texts: FormatTexts, program: str) -> Iterator[Reading]:
    figures = _measure_llama_cpp(texts) if program == THEIRS else _measure_kvmux(texts)
    for name, found in figures.items():
        if program == THEIRS:
            texts.theirs[name] = found["kl_nats"]
        peer, share = GOALS.get(name, ("", 1))
        goal = share * texts.theirs[peer] if program == OURS and peer in texts.theirs else None
        variant = f"{program}, {name}"
        yield Reading(Row("KL, mean", "nats", goal=goal), found["kl_nats"], variant=variant)
        yield Reading(Row("median", "nats"), found["kl_median"], variant=variant)
        yield Reading(Row("99th percentile", "nats"), found["kl_p99"], variant=variant)
        same = 100 * found["top1_agreement"]
        yield Reading(Row("same likeliest token", "%", lower_is_better=False), same, variant=variant)


def _measure_llama_cpp(texts: FormatTexts) -> dict[str, dict[str, float]]:
    """Return the figures of each format of llama.cpp. Raises RunError."""
    folder, options = texts.installer.folder, texts.options
    formats = {name: each for name, each in LLAMA_CPP.items() if name in options.formats}
    arguments = [folder / "source", folder / "build" / "bin", texts.model, options.threads, texts.ids, options.last]
    said = run_module("tools.peers.llama_cpp_divergence", *map(str, arguments), *formats.values())
    return dict(zip(formats, map(json.loads, said.splitlines()), strict=True))


def _measure_kvmux(texts: FormatTexts) -> dict[str, dict[str, float]]:
    """Return the figures of each format of kvmux. Raises RunError."""
    options = texts.options
    formats = {name: each for name, each in KVMUX.items() if name in options.formats}
    flags = [part for each in formats.values() for part in ("--strategy", each)]
    flags += ["--model", texts.model, "--text", str(texts.text), "--length", str(texts.length), "--texts", "1"]
    flags += ["--last", str(options.last), "--records", "0", "--dtype", options.dtype]
    flags += ["--threads", str(options.threads), "--weights", options.weights, "--kernels", options.kernels]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        run_module("server", "evaluate", *flags, "--json", str(file))
        _, *results = json.loads(file.read_text())["strategies"]  # the first is exact
    return {name: each["text"] for name, each in zip(formats, results, strict=True)}


GROUP = Group(
    """\
Measures how far predictions move when keys and values are stored in fewer bits, as KL divergence over the last tokens
of texts, on kvmux and llama.cpp with the same GGUF files. llama.cpp is built from source if it is not there.""",
    list_cases,
    add_arguments,
    Effort(1),
)
