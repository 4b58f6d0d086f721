"""`kvmux doctor`: what this machine is, which kernels it has, and whether they compute what they should.

Prints a report and writes the same as JSON, to attach where a problem is described. Loads no model.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from kernels.check import Verdict, checked
from kernels.cpu.load import usable
from kernels.load import backends
from kernels.probe import read_bandwidth
from kernels.table import DTYPES
from server.engine.device import choose_device

REPORT = Path("kvmux-doctor.json")
PACKAGES = ("kvmux", "torch", "transformers", "tokenizers", "fastapi", "uvicorn", "numpy")
PROBE_BYTES = 1 << 29
FAULT = "FAULT:"


def doctor(out: Path = REPORT) -> int:
    """Prints and writes the report; the exit code is 1 if a kernel fails its check."""
    told = report()
    console = Console()
    for title, facts in told.items():
        console.print(_table(title, facts))
    out.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    console.print(f"\nWritten to {out}: please attach it when you report a problem.")
    return int(any(FAULT in line for line in told["kernels"].values()))


def report() -> dict[str, dict[str, str]]:
    """Facts under headings."""
    return {
        "machine": dict(_machine()),
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES},
        "devices": dict(_devices()),
        "kernels": dict(_kernels()),
    }


def _machine() -> Iterator[tuple[str, str]]:
    memory = psutil.virtual_memory()
    yield "system", platform.platform()
    yield "processor", _processor()
    yield (
        "cores",
        f"{psutil.cpu_count(logical=False)}, {psutil.cpu_count()} threads; torch uses {torch.get_num_threads()}",
    )
    yield "instruction sets", ", ".join(usable()) or "none that kernels are built for"
    yield "memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free"
    yield "memory reads", f"{read_bandwidth(torch.ones(PROBE_BYTES // 4)) / 1e9:.1f} GB/s"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _devices() -> Iterator[tuple[str, str]]:
    yield "chosen", str(choose_device("auto"))
    yield "cuda", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    yield "mps", "there is one" if torch.backends.mps.is_available() else "none"


def _kernels() -> Iterator[tuple[str, str]]:
    for backend in backends():
        if backend.missing is not None:
            yield backend.name, f"none: {backend.missing}"
            continue
        ops, device = backend.load(), torch.device(backend.device_type)
        by_dtype = [checked(ops, dtype, device) for dtype in DTYPES]
        for verdicts in zip(*by_dtype, strict=True):  # of one operation
            yield f"{backend.name} {verdicts[0].op}", ", ".join(map(_words, DTYPES, verdicts))


def _words(dtype: torch.dtype, verdict: Verdict) -> str:
    found = f"off by {verdict.error:.0e}" if verdict.fault is None else f"{FAULT} {verdict.fault}"
    return f"{str(dtype).removeprefix('torch.')} {found}"


def _table(title: str, facts: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    for row in facts.items():
        table.add_row(*row)
    return table
