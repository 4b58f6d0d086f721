"""Measures speed, memory and loss of a model in each of the types of GGUF files: `make bench-types`."""

from __future__ import annotations

import argparse
import inspect
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from server.models.formats.gguf_file import read_header
from tools.bench.gguf_files import MIB, TIMEOUT, WORKLOADS, make_flags, measure_memory
from tools.bench.peers import add_folder_arguments, make_installer
from tools.bench.runner import Case, Context, Group, Reading, Row, Table
from tools.peers.installer import Installer
from tools.peers.llama_cpp import INSTALLED_VERSION, LLAMA_CPP, LLAMA_CPP_VERSION, find_program, install_llama_cpp
from tools.peers.programs import ServerNeeds, StartedServer, run_program
from tools.peers.servers import OURS, prepare_kvmux
from tools.server_process import run_bench
from tools.validation.cases import tokenize
from tools.validation.gguf_files import write_float32
from tools.validation.kvmux import KvmuxServer
from tools.validation.predictions import FloatArray

TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "IQ4_XS", "Q3_K_M", "Q2_K")
DOCUMENT = "gguf_types.md"
GUIDE = Path(__file__).parents[2] / "docs" / "guide"  # the prose whose tokens are predicted
KV_MIB, WINDOW, WINDOWS, PREDICTED = 128, 512, 4, 256  # of each text, so many windows; their last tokens are predicted
SPEED = WORKLOADS[0]
FILE_SIZE, WEIGHT_BITS = Row("file", "MB"), Row("bits a weight")
MEMORY, LOSS, LOSS_ERROR = Row("memory", "MiB"), Row("perplexity", "%"), Row("its standard error", "%")


@dataclass(frozen=True)
class ServedType:
    """A running server of a file in one type, and what does not change from turn to turn."""

    server: StartedServer
    fixed: Sequence[Reading]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", type=Path, help="a GGUF file, whose weights are quantized to each type")
    add("--types", nargs="+", default=list(TYPES), help="types as llama-quantize names them")
    add("--own-type", default="Q4_K_M", help="the type of the file, which loses nothing here (default: Q4_K_M)")
    add_folder_arguments(parser)


def list_cases(context: Context) -> Iterator[Case]:
    """Yield one case, whose variants are the types. Raises InstallError."""
    options = context.options
    installer = make_installer(context, "llama.cpp")
    installer.ensure(install_llama_cpp, INSTALLED_VERSION)
    context.notes.append(
        f"Files by llama-quantize of {LLAMA_CPP} {LLAMA_CPP_VERSION}; memory of all processes without keys and values; "
        f"the change of perplexity over {2 * WINDOWS * PREDICTED:,} tokens of prose and code. The weights come from a "
        f"file in {options.own_type}, to whose steps they were rounded already, so its loss is left out."
    )
    set_up = partial(_start, options, installer)
    table = Table(options.file.stem, variants_are_rows=True)
    yield Case(options.file.stem, table, _measure, options.types, set_up)


@contextmanager
def _start(options: argparse.Namespace, installer: Installer) -> Iterator[dict[str, ServedType]]:
    """Yield a server of each type. Raises InstallError, RunError, OSError and httpx.HTTPError."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        write_float32(options.file, as_float32 := Path(folder) / "float32.gguf")
        with _serve(as_float32, ("--dtype", "float32")) as (_, base):
            texts = _cut_texts(base)
            expected = _predict(base, texts)
        parameters = sum(
            math.prod(tensor.shape) for tensor in read_header(as_float32, vocabulary=False).tensors.values()
        )
        types: dict[str, ServedType] = {}
        for name in options.types:
            quantized = _quantize(installer, as_float32, name)
            size = quantized.stat().st_size
            server, client = started.enter_context(_serve(quantized))
            fixed = [
                Reading(FILE_SIZE, size / 1e6),
                Reading(WEIGHT_BITS, 8 * size / parameters),
                Reading(MEMORY, measure_memory(server) / MIB - KV_MIB),
            ]
            if name != options.own_type:
                fixed += read_losses(expected - _predict(client, texts))
            types[name] = ServedType(server, fixed)
        yield types


def read_losses(losses: FloatArray) -> list[Reading]:
    """Return the change of perplexity and its error; `losses` are nats by which each token became less likely."""
    error = float(losses.std()) / math.sqrt(len(losses))
    return [Reading(LOSS, 100 * math.expm1(losses.mean())), Reading(LOSS_ERROR, 100 * error)]


def _measure(types: dict[str, ServedType], name: str) -> Iterator[Reading]:
    (found,) = run_bench(types[name].server.url, make_flags(OURS, SPEED), TIMEOUT)
    yield Reading(SPEED.row, SPEED.compute(found))
    yield from types[name].fixed


def _quantize(installer: Installer, source: Path, name: str) -> Path:
    """Write a file of a type beside its source. Raises InstallError, for unknown types, too."""
    target = source.with_name(f"{name}.gguf")
    program = str(find_program(installer.folder, "llama-quantize"))
    installer.run(f"quantizing to {name}", [program, str(source), str(target), name, str(os.cpu_count() or 1)])
    return target


@contextmanager
def _serve(file: Path, flags: Sequence[str] = ()) -> Iterator[tuple[StartedServer, KvmuxServer]]:
    """Serve a file with its defaults until the block ends. Raises RunError."""
    program = prepare_kvmux(file, f"{KV_MIB}MiB", flags)
    with (
        run_program(program, ServerNeeds(1, WINDOW + 2)) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT, trust_env=False) as http,
    ):
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        yield server, KvmuxServer(http, model, {})


def _cut_texts(server: KvmuxServer) -> list[list[int]]:
    """Return windows of prose and of code, as tokens."""
    windows = []
    prose = "".join(file.read_text() for file in sorted(GUIDE.glob("*.md")) if file.name != DOCUMENT)
    for text in (prose, inspect.getsource(argparse)):
        ids, plain = tokenize(server, text)
        begin = ids[: len(ids) - len(plain)]
        step = WINDOW - len(begin)
        windows += [[*begin, *plain[i * step : (i + 1) * step]] for i in range(WINDOWS)]
    return windows


def _predict(server: KvmuxServer, windows: Sequence[Sequence[int]]) -> FloatArray:
    return server.predict("paged", windows, PREDICTED).log_probs


GROUP = Group(
    """\
llama.cpp's own llama-quantize writes files of each type, from the weights of one file as float32. The servers of all
files are up at the same time and are measured by turns. What a type loses is the perplexity of two texts beside that of
the float32 file.""",
    list_cases,
    add_arguments,
    command="make bench-types",
    document=f"guide/{DOCUMENT}",
    parts=("types",),
)
