"""Measures real GGUF files on kvmux and llama.cpp, as their users start them: `python -m tools.bench gguf_files`.

Both servers are up at the same time. llama.cpp is started once for each number of streams, since it divides its context
among them. The figures are those of one chat (tokens a second, the first token after 1,024), of eight at once, of the
start and of memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from server.engine.device import choose_threads
from server.models.formats.gguf_file import GGUFHeader, read_header
from server.models.formats.gguf_weights import compute_nbytes
from server.profiling.machine import measure_bandwidth
from tools.bench.peers import add_folder_arguments, describe_program, make_installer
from tools.bench.runner import Case, Context, Effort, Group, Reading, Row, Table
from tools.peers.programs import ServerNeeds, ServerProgram, StartedServer, list_family, run_program
from tools.peers.servers import OURS, prepare_kvmux, prepare_llama_cpp
from tools.real_models import REAL_MODELS
from tools.server_process import RunError, run_bench

THEIRS = "llama.cpp"
TIMEOUT = 900.0  # seconds that a workload may take
CONTEXT = 1280  # tokens of a sequence that servers are started for
MIB, OUR_KV_MIB = 1 << 20, 512  # 8 sequences of every file take less


class FileWorkload(NamedTuple):
    """What is measured of a file: requests, and the figure of their results."""

    row: Row
    streams: int
    prompt_tokens: int
    max_tokens: int
    requests: int
    compute: Callable[[Mapping[str, Any]], float]


WORKLOADS = (
    FileWorkload(
        Row("1 stream", "tokens/s", False), 1, 128, 128, 1, lambda found: 1e3 / float(found["itl_ms"]["mean"])
    ),
    FileWorkload(Row("first token after 1,024", "ms"), 1, 1024, 2, 1, lambda found: float(found["ttft_ms"]["p50"])),
    FileWorkload(Row("8 at once", "tokens/s", False), 8, 256, 64, 8, lambda found: float(found["tokens_per_second"])),
)
READY, MEMORY = Row("ready", "s"), Row("memory without keys and values", "MiB")


@dataclass(frozen=True)
class RunningFile:
    """The servers of one file, and the bytes of weights that a step reads."""

    step_bytes: int
    servers: Mapping[tuple[str, int], StartedServer]  # by name and number of streams
    memory: Mapping[str, int]  # bytes by server: proportional, without keys and values


def list_cases(context: Context) -> Iterator[Case]:
    """Yield a case for each file that `make models` has fetched. Raises OSError and InstallError."""
    files = [model.path for model in REAL_MODELS.values() if model.path.exists()]
    if not files:
        raise OSError("there is no real model: `make models` fetches them")
    installer = make_installer(context, "llama.cpp")
    for file in files:
        programs = {OURS: prepare_kvmux(file, f"{OUR_KV_MIB}MiB"), THEIRS: prepare_llama_cpp(file, installer)}
        table = Table(f"{file.stem}, {file.stat().st_size / 1e6:,.0f} MB", base=OURS)
        yield Case(file.stem, table, _measure, list(programs), partial(_start, file, programs))
    context.notes.extend(describe_program(each, ServerNeeds(8, CONTEXT)) for each in programs.values())


@contextmanager
def _start(file: Path, programs: Mapping[str, ServerProgram]) -> Iterator[RunningFile]:
    """Yield the servers of a file, each after a first request. Raises RunError."""
    header = read_header(file, vocabulary=False)
    servers: dict[tuple[str, int], StartedServer] = {}
    memory: dict[str, int] = {}
    with ExitStack() as started:
        for name, program in programs.items():
            for streams in (1, 8) if name == THEIRS else (8,):
                server = started.enter_context(run_program(program, ServerNeeds(streams, CONTEXT)))
                servers[name, streams] = server
                if name not in memory:
                    run_bench(server.url, make_flags(name, WORKLOADS[0]), TIMEOUT)
                    memory[name] = measure_memory(server) - _count_kv_bytes(name, header)
        yield RunningFile(count_step_bytes(header), servers, memory)


def count_step_bytes(header: GGUFHeader) -> int:
    """Return the bytes of all tensors but an embedding of its own, of which a step reads a row a stream."""
    sizes = {name: compute_nbytes(tensor) for name, tensor in header.tensors.items()}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    return sum(sizes.values())


def measure_memory(server: StartedServer) -> int:
    """Return the proportional set size of all processes of a server, in bytes."""
    return sum(map(_measure_process, list_family(server.process)))


def _measure_process(process: psutil.Process) -> int:
    if sys.platform != "linux":
        raise RunError("the memory of a server is measured by proportional sizes, which only Linux reports")
    return int(process.memory_full_info().pss)


def _count_kv_bytes(name: str, header: GGUFHeader) -> int:
    """Return the bytes of memory for keys and values, all of which both servers fill with zeros when they start."""
    if name == OURS:
        return OUR_KV_MIB * MIB
    metadata, prefix = header.metadata, header.metadata["general.architecture"]
    heads, width = metadata[f"{prefix}.attention.head_count"], metadata[f"{prefix}.embedding_length"]
    head_dim = metadata.get(f"{prefix}.attention.key_length", width // heads)
    kv_heads = metadata.get(f"{prefix}.attention.head_count_kv", heads)
    return int(CONTEXT * metadata[f"{prefix}.block_count"] * kv_heads * head_dim * 2 * 2)  # float16


def make_flags(name: str, work: FileWorkload) -> list[str]:
    """Return the flags of `kvmux bench`."""
    sizes = ["--prompt-tokens", work.prompt_tokens, "--max-tokens", work.max_tokens, "--requests", work.requests]
    flags = [*map(str, sizes), "--concurrency", str(work.streams), "--rounds", "1"]
    return [*flags, "--strategies", "paged"] if name == OURS else flags


def _measure(subject: RunningFile, name: str) -> Iterator[Reading]:
    """Run all workloads on one server; the limit of one stream is that of reading the bytes of a step."""
    limit = measure_bandwidth(subject.step_bytes, choose_threads(None, subject.step_bytes)) / subject.step_bytes
    for work in WORKLOADS:
        server = subject.servers.get((name, work.streams)) or subject.servers[name, 8]
        (found,) = run_bench(server.url, make_flags(name, work), TIMEOUT)
        yield Reading(work.row, work.compute(found), limit if work is WORKLOADS[0] else None)
    yield Reading(READY, subject.servers[name, 8].ready_seconds)
    yield Reading(MEMORY, subject.memory[name] / MIB)


GROUP = Group(
    "Measures the real models of `make models` on kvmux and llama.cpp, which is built from source, by turns.",
    list_cases,
    add_folder_arguments,
    Effort(2),
)
