"""`make bench-peers ARGS="--rows gguf"`: real GGUF files on kvmux and llama.cpp, as their users start them.

Both servers are up at the same time and are measured by turns, the other one first in every second turn. llama.cpp is
started once for each number of streams, since it divides its context among them. The figures are those of one chat
(tokens a second, the first token after 1,024), of eight at once, of the start and of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from server.engine.device import choose_threads
from server.models.formats.gguf_file import GGUFHeader, read_header
from server.models.formats.gguf_weights import compute_nbytes
from server.profiling.background_load import BUSY_THRESHOLD, Neighbours
from server.profiling.machine import measure_bandwidth
from tools.bench.table.report import DISTURBED_MARK, format_number, read_processor_name
from tools.compare_checkouts import compute_interval
from tools.peers.programs import ServerNeeds, ServerProgram, StartedServer, list_family, run_program
from tools.server_process import run_bench

OURS, THEIRS = "kvmux", "llama.cpp"
TIMEOUT = 900.0  # seconds that a workload may take
CONTEXT = 1280  # tokens of a sequence that servers are started for
MIB, OUR_KV_MIB = 1 << 20, 512  # 8 sequences of every file take less


class FileWorkload(NamedTuple):
    """What is measured of a file: requests, and the figure of their results."""

    what: str
    unit: str
    streams: int
    prompt_tokens: int
    max_tokens: int
    requests: int
    compute: Callable[[Mapping[str, Any]], float]
    higher_is_better: bool = True


WORKLOADS = (
    FileWorkload("1 stream", "tokens/s", 1, 128, 128, 1, lambda found: 1e3 / float(found["itl_ms"]["mean"])),
    FileWorkload("first token after 1,024", "ms", 1, 1024, 2, 1, lambda found: float(found["ttft_ms"]["p50"]), False),
    FileWorkload("8 at once", "tokens/s", 8, 256, 64, 8, lambda found: float(found["tokens_per_second"])),
)


@dataclass
class FileReport:
    """The measurements of one file."""

    file: Path
    step_bytes: int  # that a step reads of the weights
    ready_seconds: dict[str, float] = field(default_factory=dict)  # by server
    memory: dict[str, int] = field(default_factory=dict)  # bytes by server: proportional, without keys and values
    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # by server and workload, one a turn
    bandwidths: list[float] = field(default_factory=list)  # bytes per second, one a turn
    background_load: float = 0.0  # the largest share of other processes in a turn

    def ratios(self, work: FileWorkload) -> list[float]:
        """Return how many times as fast kvmux was in each turn."""
        pairs = zip(self.values[OURS, work.what], self.values[THEIRS, work.what], strict=True)
        return [ours / theirs if work.higher_is_better else theirs / ours for ours, theirs in pairs]


Program = Callable[[Path], ServerProgram]


def measure_files(
    files: Sequence[Path], programs: Mapping[str, Program], turns: int, show_status: Callable[[str], None]
) -> Iterator[FileReport]:
    """Yield the report of each file; `programs` make the servers OURS and THEIRS. Raises OSError and RunError."""
    for file in files:
        header = read_header(file, vocabulary=False)
        report = FileReport(file, count_step_bytes(header))
        with ExitStack() as started:
            servers = {
                (name, streams): _start(program(file), streams, header, report, started, show_status)
                for name, program in programs.items()
                for streams in ((1, 8) if name == THEIRS else (8,))
            }
            for turn in range(turns):
                show_status(f"{file.stem}, turn {turn + 1} of {turns}")
                _measure_turn(servers, report, turn)
        yield report


def count_step_bytes(header: GGUFHeader) -> int:
    """Return the bytes of all tensors but an embedding of its own, of which a step reads a row a stream."""
    sizes = {name: compute_nbytes(tensor) for name, tensor in header.tensors.items()}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    return sum(sizes.values())


def _start(
    program: ServerProgram,
    streams: int,
    header: GGUFHeader,
    report: FileReport,
    started: ExitStack,
    show_status: Callable[[str], None],
) -> StartedServer:
    """Start a server, note its time and, after a first request, its memory."""
    show_status(f"{report.file.stem}: starting {program.name}")
    server = started.enter_context(run_program(program, ServerNeeds(streams, CONTEXT)))
    report.ready_seconds.setdefault(program.name, server.ready_seconds)
    if program.name not in report.memory:
        run_bench(server.url, make_flags(program.name, WORKLOADS[0]), TIMEOUT)
        report.memory[program.name] = measure_memory(server) - _count_kv_bytes(program.name, header)
    return server


def measure_memory(server: StartedServer) -> int:
    """Return the proportional set size of all processes of a server, in bytes."""
    return sum(each.memory_full_info().pss for each in list_family(server.process))


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


def _measure_turn(servers: Mapping[tuple[str, int], StartedServer], report: FileReport, turn: int) -> None:
    report.bandwidths.append(measure_bandwidth(report.step_bytes, choose_threads(None, report.step_bytes)))
    neighbours = Neighbours()
    before = sum(server.cpu_seconds() for server in servers.values())
    for work in WORKLOADS:
        for name in (OURS, THEIRS) if turn % 2 == 0 else (THEIRS, OURS):
            server = servers.get((name, work.streams)) or servers[name, 8]
            (found,) = run_bench(server.url, make_flags(name, work), TIMEOUT)
            report.values.setdefault((name, work.what), []).append(work.compute(found))
    used = sum(server.cpu_seconds() for server in servers.values()) - before
    report.background_load = max(report.background_load, neighbours.compute_share(used))


def as_text(reports: Sequence[FileReport], programs: Sequence[ServerProgram]) -> str:
    """Return the tables in GitHub's Markdown."""
    bandwidths = [each / 1e9 for report in reports for each in report.bandwidths]
    lines = [
        f"{read_processor_name()}, {psutil.cpu_count()} processors, both servers up, medians of "
        f"{len(reports[0].bandwidths)} turns; the interval has the median of the ratios with 95 % from six turns on. "
        "In brackets: the share of a plain read of the bytes of a step. The memory was read at "
        f"{min(bandwidths):.1f} to {max(bandwidths):.1f} GB/s.",
        "",
        "| file | work | kvmux | llama.cpp | times as fast |",
        "|---|---|---:|---:|---:|",
    ]
    for report in reports:
        lines += [_format_row(report, work) for work in WORKLOADS]
    lines += [
        "",
        "| file | bytes, MB | server | ready, s | memory without keys and values, MiB |",
        "|---|---:|---|---:|---:|",
    ]
    for report in reports:
        size = report.file.stat().st_size / 1e6
        lines += [
            f"| {report.file.stem} | {size:,.0f} | {name} | {report.ready_seconds[name]:.1f} | "
            f"{report.memory[name] / MIB:,.0f} |"
            for name in (OURS, THEIRS)
        ]
    commands = [f"- {each.version}: `{each.make_command(ServerNeeds(8, CONTEXT), 0).describe()}`" for each in programs]
    return "\n".join([*lines, "", *commands])


def _format_row(report: FileReport, work: FileWorkload) -> str:
    ours, theirs = (median(report.values[name, work.what]) for name in (OURS, THEIRS))
    mark = DISTURBED_MARK if report.background_load > BUSY_THRESHOLD else ""
    share = ""
    if work.streams == 1 and work.higher_is_better:
        shares = [
            value * report.step_bytes / bandwidth
            for value, bandwidth in zip(report.values[OURS, work.what], report.bandwidths, strict=True)
        ]
        share = f" ({median(shares):.0%})"
    ratios = report.ratios(work)
    low, high = compute_interval(ratios)
    return (
        f"| {report.file.stem} | {work.what}, {work.unit} | {format_number(ours)}{mark}{share} | "
        f"{format_number(theirs)}{mark} | {median(ratios):.2f} ({low:.2f} to {high:.2f}) |"
    )
