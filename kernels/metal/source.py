"""Assembles a Metal source and its headers into one text, as torch.mps.compile_shader has no include path.

Adds a typedef for each type. Knows neither kernels nor devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from kernels.kv_formats import UINT4

FOLDER = Path(__file__).parent
TYPE_NAMES = {
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bfloat",
    torch.int8: "char",
    UINT4: "uchar",  # bytes of two numbers
}
INCLUDE = re.compile(r'#include "(.+)"\n')


def assemble_source(name: str, types: Mapping[str, torch.dtype]) -> str:
    """Return `name`.metal with its headers expanded, after a typedef for each type (such as `typedef half T;`)."""
    typedefs = "".join(f"typedef {TYPE_NAMES[dtype]} {of};\n" for of, dtype in types.items())
    return "#include <metal_stdlib>\n" + typedefs + "".join(_expand_includes(f"{name}.metal", set()))


def _expand_includes(file: str, included: set[str]) -> Iterator[str]:
    """Yield the lines of a file, with headers inserted once and #line directives that say where lines are from."""
    yield f'#line 1 "{file}"\n'
    for number, line in enumerate((FOLDER / file).read_text(encoding="ascii").splitlines(keepends=True), 1):
        header = INCLUDE.fullmatch(line)
        if header is None:
            yield "\n" if line == "#pragma once\n" else line
        elif header[1] not in included:
            included.add(header[1])
            yield from _expand_includes(header[1], included)
            yield f'#line {number + 1} "{file}"\n'
