"""`kvmux doctor`: reports on this machine, its kernels, whether they compute correctly, and how fast.

Prints a report and writes the same as JSON, to attach to a bug report; or with --model says how a model would run
(model_report.py). Loads no weights; calls a device from one thread only, as a Mac requires.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from config.errors import SettingsError
from config.presets import PRESETS
from kernels.backends import Backend, list_backends
from kernels.cpu.instruction_sets import usable_instruction_sets
from kernels.ops import DTYPES
from kernels.selfcheck.check import Verdict, check_ops
from kernels.selfcheck.op_db import OPS
from kernels.tracing import OpTimer, Tracer, trace_ops
from server.cli.model_report import describe_model
from server.cli.standard_streams import print_safely
from server.engine.device import CORES, choose_device
from server.processes.cgroups import read_memory_limit
from server.profiling.machine import measure_read_bandwidth, read_processor_name

REPORT = Path("kvmux-doctor.json")
PACKAGES = ("kvmux", "torch", "transformers", "tokenizers", "fastapi", "uvicorn", "numpy")
PROBE_BYTES = 1 << 29
FAULT = "FAULT:"


def doctor(options: Mapping[str, Any]) -> int:
    """Print and write the report; return the exit code: 1 if a kernel fails its check or --out cannot be written."""
    out: Path = options.get("out", REPORT)
    console = Console()
    if (model := options.get("model")) is not None:
        return _report_model(console, model)
    console.print("Compiling (unless cached) and checking the kernels ...")
    report = make_report()
    for title, facts in report.items():
        console.print(_make_table(title, facts))
    text = json.dumps(report, indent=2)
    error = _write_report(out, text)
    if error is None:
        console.print(f"\nWritten to {out}: please attach it when you report a problem.")
    # ask for the report even without a fault: the kernels have not been run on all kinds of Mac
    if torch.backends.mps.is_available():
        console.print("A report from a Mac is welcome even if nothing is wrong.")
    if error is not None or torch.backends.mps.is_available():
        print(f"\n```json\n{text}\n```")
    if error is not None:
        message = (
            f"kvmux: cannot write the report to {out} ({error}): choose another file with --out, or copy it from above"
        )
        print_safely(message, sys.stderr)
    return int(error is not None or any(FAULT in line for line in report["kernels"].values()))


def _report_model(console: Console, model: str) -> int:
    """Print how a model would run here; return the exit code: 1 if it cannot be served."""
    try:
        report = describe_model(model)
    except SettingsError as error:
        print_safely(f"kvmux: {error}", sys.stderr)
        return 1
    for title, facts in report.items():
        console.print(_make_table(title, facts))
    return 0


def _write_report(out: Path, text: str) -> str | None:
    """Write the report to a file; return in words why it could not be written, None if it was."""
    try:
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        return error.strerror or str(error)
    return None


def make_report() -> dict[str, dict[str, str]]:
    """Return the report: under each heading, facts about this machine by their names."""
    return {
        "machine": dict(_describe_machine()),
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES},
        "devices": dict(_describe_devices()),
        "kernels": dict(_check_kernels()),
        "presets": dict(_describe_presets()),
    }


def _describe_machine() -> Iterator[tuple[str, str]]:
    memory = psutil.virtual_memory()
    yield "system", platform.platform()
    yield "processor", read_processor_name()
    yield (
        "cores",
        f"{psutil.cpu_count(logical=False)}, {psutil.cpu_count()} threads; kvmux uses {CORES}",
    )
    yield "instruction sets", ", ".join(usable_instruction_sets()) or "none that kernels are built for"
    yield "memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free"
    if (limit := read_memory_limit()) is not None:
        yield "memory limit", f"{limit.total / 2**30:.1f} GiB, {limit.free / 2**30:.1f} GiB free"
    yield "memory reads", f"{measure_read_bandwidth(torch.ones(PROBE_BYTES // 4)) / 1e9:.1f} GB/s"


def _describe_devices() -> Iterator[tuple[str, str]]:
    yield "chosen", choose_device("auto").name
    yield "cuda", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    yield "mps", _describe_metal() if torch.backends.mps.is_available() else "none"


def _describe_metal() -> str:
    recommended, used = torch.mps.recommended_max_memory(), torch.mps.driver_allocated_memory()
    system = f"macOS {platform.mac_ver()[0]}"
    return f"{system}; {recommended / 2**30:.1f} GiB recommended, {used / 2**30:.1f} GiB of it taken by this process"


def _check_kernels() -> Iterator[tuple[str, str]]:
    for backend in list_backends():
        if backend.missing is not None:
            yield backend.name, f"none: {backend.missing}"
        elif backend.device.is_emulated:
            # emulated kernels are not checked here: an engine checks them at its start, and their speed means nothing
            yield backend.name, f"usable: --device {backend.device.name}"
        else:
            yield from _check_backend(backend)


def _check_backend(backend: Backend) -> Iterator[tuple[str, str]]:
    """Yield (name, verdict) for each operation of a backend; a verdict's time includes compilation and all samples."""
    tracer, device = Tracer(), backend.device.tensors
    ops = trace_ops(backend.load(), tracer)
    by_dtype = []
    for dtype in DTYPES:
        with tracer.record(OpTimer(device)) as timer:
            verdicts = check_ops(ops, dtype, device)
        by_dtype.append([_format_verdict(dtype, verdict, timer.seconds.get(verdict.op)) for verdict in verdicts])
    for op, words in zip(OPS, zip(*by_dtype, strict=True), strict=True):
        yield f"{backend.name} {op.name}", ", ".join(words)


def _format_verdict(dtype: torch.dtype, verdict: Verdict, seconds: float | None) -> str:
    """Return the verdict on an operation as text; `seconds` is None if it consists of others: it is not timed."""
    found = f"off by {verdict.error:.0e}" if verdict.fault is None else f"{FAULT} {verdict.fault}"
    took = "" if seconds is None else f" in {1e3 * seconds:.1f} ms"
    return f"{str(dtype).removeprefix('torch.')} {found}{took}"


def _describe_presets() -> Iterator[tuple[str, str]]:
    for name, preset in PRESETS.items():
        settings = ", ".join(f"{option} = {value}" for option, value in preset.settings.items())
        yield name, f"{settings}: {preset.description}"


def _make_table(title: str, facts: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    for row in facts.items():
        table.add_row(*row)
    return table
