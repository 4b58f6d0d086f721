"""Compiles every Metal kernel as CUDA C++ and tells what each needs: registers, spilled bytes, stack, shared memory.

No GPU is needed. Registers bound Apple's GPUs, too, for which no such figures are to be had without a Mac.

`python -m tests.kernels.cuda.resources` prints the table of resources.md, beside this file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kernels.cuda.nvrtc import compile_source
from kernels.cuda.translation import translate
from kernels.metal.source import FOLDER, assemble_source
from metal_emulator.__main__ import Types, list_type_sets

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")  # A100, H100 and H200, B200

_KERNEL = re.compile(r"Compiling entry function '(\w+)' for '\w+'\n(.*?)(?=ptxas info\s+: Compiling|\Z)", re.DOTALL)
_FIGURES = (
    re.compile(r"Used (\d+) registers"),
    re.compile(r"(\d+) bytes spill stores"),
    re.compile(r"(\d+) bytes stack frame"),
    re.compile(r"(\d+) bytes smem"),
)


class Resources(NamedTuple):
    """What a kernel needs: registers of a thread; bytes of a thread that are spilled or indexed; shared bytes."""

    registers: int
    spilled: int
    stack: int
    shared: int

    def __str__(self) -> str:
        return f"{self.registers} / {self.spilled} / {self.stack} / {self.shared}"


def compile_file(name: str, types: Types, architecture: str) -> Iterator[tuple[str, Resources]]:
    """Yield the name of each kernel of `name`.metal, and what it needs. Raises SyntaxError if it does not compile."""
    log = compile_source(translate(assemble_source(name, types)), architecture).log
    for kernel, text in _KERNEL.findall(log):
        found = (figure.search(text) for figure in _FIGURES)
        yield kernel, Resources(*(int(each[1]) if each else 0 for each in found))


def compile_all() -> Mapping[str, list[Resources]]:
    """Return for each kernel the most that it needs in any types, by architecture."""
    most: dict[str, list[Resources]] = {}
    for i, architecture in enumerate(ARCHITECTURES):
        for path in sorted(FOLDER.glob("*.metal")):
            print(architecture, path.name, file=sys.stderr, flush=True)
            for types in list_type_sets(path.stem):
                for kernel, found in compile_file(path.stem, types, architecture):
                    row = most.setdefault(kernel, [Resources(0, 0, 0, 0)] * len(ARCHITECTURES))
                    row[i] = Resources(*map(max, row[i], found))
    return most


def markdown(most: Mapping[str, list[Resources]]) -> str:
    """Return the table of resources.md."""
    head = f"| kernel | {' | '.join(ARCHITECTURES)} |\n|---|{'---|' * len(ARCHITECTURES)}"
    rows = (f"| `{kernel}` | {' | '.join(map(str, row))} |" for kernel, row in sorted(most.items()))
    return "\n".join((head, *rows))


def read_table(text: str) -> Mapping[str, list[Resources]]:
    """Return the figures of a table that `markdown` has written."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    return {kernel: [Resources(*map(int, cell.split(" / "))) for cell in cells.split(" | ")] for kernel, cells in rows}


if __name__ == "__main__":
    print(markdown(compile_all()))
