"""`make bench-types`: speed, memory and loss of a model in each of the types that GGUF files are offered in.

llama.cpp's own llama-quantize writes the files, from the weights of one file as float32. The servers of all files are
up at the same time and are measured by turns. What a type loses is the perplexity of two texts beside that of the
float32 file. A type whose steps the given file was rounded to loses nothing here, so it is left out of that column.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import psutil

from server.models.formats.gguf_file import read_header
from tools.bench.peers.gguf_files import MIB, OURS, TIMEOUT, WORKLOADS, make_flags, measure_memory
from tools.bench.peers.servers import prepare_kvmux
from tools.bench.table.documents import update_section
from tools.bench.table.models import peers_folder
from tools.bench.table.report import read_processor_name
from tools.peers.installer import Installer, InstallError, parse_folder
from tools.peers.llama_cpp import INSTALLED_VERSION, LLAMA_CPP, LLAMA_CPP_VERSION, find_program, install_llama_cpp
from tools.peers.programs import ServerNeeds, StartedServer, run_program
from tools.server_process import RunError, run_bench, sigterm_as_ctrl_c
from tools.status_line import status_line
from tools.validation.files import tokenize
from tools.validation.gguf_files import write_float32
from tools.validation.kvmux import KvmuxServer
from tools.validation.predictions import FloatArray

TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "IQ4_XS", "Q3_K_M", "Q2_K")
DOCUMENT, MARK = Path("guide") / "gguf_types.md", "make bench-types"
GUIDE = Path(__file__).parents[3] / "docs" / "guide"  # the prose whose tokens are predicted
KV_MIB, WINDOW, WINDOWS, PREDICTED = 128, 512, 4, 256  # of each text, so many windows; their last tokens are predicted
SPEED = WORKLOADS[0]

ShowStatus = Callable[[str], None]


@dataclass
class TypeReport:
    """The measurements of one type."""

    name: str
    nbytes: int  # of the file
    parameters: int
    memory: int  # bytes: proportional, without keys and values
    losses: FloatArray  # [positions] in nats: how much less likely each token of the texts is than in float32
    speeds: list[float] = field(default_factory=list)  # tokens per second, one a turn

    @property
    def perplexity(self) -> tuple[float, float]:
        """The relative change of perplexity, and its standard error."""
        return math.expm1(self.losses.mean()), float(self.losses.std()) / math.sqrt(len(self.losses))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-types", description=__doc__)
    add = parser.add_argument
    add("file", type=Path, help="a GGUF file, whose weights are quantized to each type")
    add("--types", nargs="+", default=list(TYPES), help="types as llama-quantize names them")
    add("--own-type", default="Q4_K_M", help="the type of the file, which loses nothing here (default: Q4_K_M)")
    add("--turns", type=int, default=3, help="rounds of measuring the speed (default: 3)")
    add("--folder", type=parse_folder, default=peers_folder(), help="folder of llama.cpp (default: user's cache)")
    add("--pip-args", default="", help="further arguments of pip, such as an index with torch's builds for CPUs")
    add("--docs", type=Path, help=f"write the table into {DOCUMENT} of this folder")
    options = parser.parse_args(arguments)
    with sigterm_as_ctrl_c(), status_line() as show_status:
        try:
            installer = Installer(options.folder / "llama.cpp", shlex.split(options.pip_args), show_status)
            installer.ensure(install_llama_cpp, INSTALLED_VERSION)
            reports = measure_types(options.file, options.types, options.turns, installer, show_status)
            print(text := as_text(options.file, reports, options.own_type))
            if options.docs:
                update_section(options.docs / DOCUMENT, MARK, text)
        except (OSError, ValueError, RunError, InstallError, httpx.HTTPError) as error:
            print(f"make bench-types: {error}", file=sys.stderr)
            return 2
    return 0


def measure_types(
    file: Path, types: Sequence[str], turns: int, installer: Installer, show_status: ShowStatus
) -> list[TypeReport]:
    """Return a report of each type. Raises InstallError, RunError, OSError and httpx.HTTPError."""
    reports: list[TypeReport] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        show_status("writing the weights as float32")
        write_float32(file, as_float32 := Path(folder) / "float32.gguf")
        show_status("predicting with float32")
        with _serve(as_float32, ("--dtype", "float32")) as (_, base):
            texts = _cut_texts(base)
            expected = _predict(base, texts)
        parameters = sum(math.prod(tensor.shape) for tensor in read_header(file, vocabulary=False).tensors.values())
        servers = []
        for name in types:
            quantized = _quantize(installer, as_float32, name)
            show_status(f"{name}: predicting")
            server, client = started.enter_context(_serve(quantized))
            losses = expected - _predict(client, texts)
            memory = measure_memory(server) - KV_MIB * MIB
            reports.append(TypeReport(name, quantized.stat().st_size, parameters, memory, losses))
            servers.append(server)
        for turn in range(turns):
            for report, server in zip(reports, servers, strict=True):
                show_status(f"turn {turn + 1} of {turns}: {report.name}")
                (found,) = run_bench(server.url, make_flags(OURS, SPEED), TIMEOUT)
                report.speeds.append(SPEED.compute(found))
    return reports


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
    prose = "".join(file.read_text() for file in sorted(GUIDE.glob("*.md")) if file.name != DOCUMENT.name)
    for text in (prose, inspect.getsource(argparse)):
        ids, plain = tokenize(server, text)
        begin = ids[: len(ids) - len(plain)]
        step = WINDOW - len(begin)
        windows += [[*begin, *plain[i * step : (i + 1) * step]] for i in range(WINDOWS)]
    return windows


def _predict(server: KvmuxServer, windows: Sequence[Sequence[int]]) -> FloatArray:
    return server.predict("paged", windows, PREDICTED).log_probs


# ---------------------------------------------------------------- the table
def as_text(file: Path, reports: Sequence[TypeReport], own_type: str) -> str:
    """Return the table in GitHub's Markdown."""
    positions = len(reports[0].losses)
    lines = [
        f"{file.stem}, {read_processor_name()}, {psutil.cpu_count()} processors; files by llama-quantize of "
        f"{LLAMA_CPP} {LLAMA_CPP_VERSION}. One stream, medians of {len(reports[0].speeds)} turns; memory of all "
        f"processes without keys and values; the change of perplexity over {positions:,} tokens of prose and code with "
        f"its standard error. The weights come from a file in {own_type}, to whose steps they were rounded already.",
        "",
        "| type | file, MB | bits a weight | tokens/s | memory, MiB | perplexity |",
        "|---|---:|---:|---:|---:|---:|",
        *(_format_row(each, own_type) for each in reports),
    ]
    return "\n".join(lines)


def _format_row(report: TypeReport, own_type: str) -> str:
    change, error = report.perplexity
    loss = "(the file's own)" if report.name == own_type else f"{change:+.1%} ± {error:.1%}"
    return (
        f"| {report.name} | {report.nbytes / 1e6:,.0f} | {8 * report.nbytes / report.parameters:.1f} | "
        f"{median(report.speeds):.1f} | {report.memory / MIB:,.0f} | {loss} |"
    )


if __name__ == "__main__":
    sys.exit(main())
