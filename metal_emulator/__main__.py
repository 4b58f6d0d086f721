"""`python -m metal_emulator [FILE ...]`: finds what Apple's compiler would refuse in Metal sources.

Without files, it checks all Metal kernels of this project, for every set of types for which the backend compiles them.
Prints "file:line: message" for each fault, and exits with 1 if there are any, or with 2 if there is no clang.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch

from kernels.kv_formats import UINT4
from kernels.metal.arguments import KERNEL_DTYPES
from kernels.metal.source import FOLDER, TYPE_NAMES, assemble_source
from metal_emulator import CompilerMissing
from metal_emulator.address_spaces import Clang

Types = Mapping[str, torch.dtype]


def _list_kv_types(activations: torch.dtype) -> Iterable[Types]:
    """Yield types of keys and values: each format beside itself, and beside another one."""
    for k, v in pairwise((activations, activations, torch.int8, torch.int8, UINT4, UINT4, activations)):
        yield {"K": k, "V": v}


# Each Metal file is compiled for T, the type of activations. FURTHER_TYPES has the sets of further types by file, which
# may depend on T.
FURTHER_TYPES: Mapping[str, Callable[[torch.dtype], Iterable[Types]]] = {
    "decode": _list_kv_types,
    "norms": lambda activations: [{"W": each} for each in dict.fromkeys((activations, torch.float32))],  # of the weight
    "prefill": _list_kv_types,
    "quantized": lambda _: [{"S": each} for each in KERNEL_DTYPES],  # of scales and offsets of a quantized weight
    "store": _list_kv_types,
}


def list_type_sets(name: str) -> list[Types]:
    """Return all sets of types for which `name`.metal is compiled."""
    if name not in FURTHER_TYPES:
        return [{"T": each} for each in KERNEL_DTYPES]
    return [{"T": each, **others} for each in KERNEL_DTYPES for others in FURTHER_TYPES[name](each)]


def check_file(clang: Clang, path: Path) -> list[str]:
    """Return the faults of a file, one line each; a fault that only some types have names one. Raises OSError."""
    if path.resolve().parent != FOLDER.resolve() or path.suffix != ".metal":
        text = f'#line 1 "{path}"\n{path.read_text(encoding="utf-8", errors="replace")}'
        return _check_source(clang, text, path.parent)
    types_by_line: dict[str, list[str]] = {}
    type_sets = list_type_sets(path.stem)
    for types in type_sets:
        for line in _check_source(clang, assemble_source(path.stem, types), path.parent):
            types_by_line.setdefault(line, []).append(
                ", ".join(f"{type_name} {TYPE_NAMES[dtype]}" for type_name, dtype in types.items())
            )
    return [
        line if len(found_for) == len(type_sets) else f"{line} ({found_for[0]})"
        for line, found_for in types_by_line.items()
    ]


def _check_source(clang: Clang, text: str, folder: Path) -> list[str]:
    try:
        clang.check(text, [folder])
    except SyntaxError as error:
        return str(error).splitlines()
    return []


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m metal_emulator", description="Finds what Apple's compiler would refuse."
    )
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="Metal sources (default: those in kernels/metal)"
    )
    files: list[Path] = parser.parse_args(arguments).files or sorted(FOLDER.glob("*.metal"))
    try:
        clang = Clang.find()
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            found = [line for lines in threads.map(lambda path: check_file(clang, path), files) for line in lines]
    except (CompilerMissing, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(dict.fromkeys(found)) or f"{len(files)} files: nothing that Apple's compiler is known to refuse")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
