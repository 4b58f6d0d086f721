"""Every kernel compiles for NVIDIA's GPUs, in all types, and needs hardly more than resources.md says.

NVRTC and CUDA's headers are not installed with the tests, so they are marked slow; `make check-metal` runs them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.cuda.nvrtc import find_compiler
from kernels.device import KernelsMissing
from kernels.metal.source import FOLDER
from metal_emulator.__main__ import list_type_sets
from tests.kernels.cuda.resources import ARCHITECTURES, Resources, compile_file, read_table

TABLE = Path(__file__).with_name("resources.md")
# NVRTC does not compile a source alike in all processes: by so much (registers; bytes spilled, on the stack, shared)
# may a kernel need more than it did when the table was made.
SLACK = Resources(8, 32, 32, 0)


def is_compiler_missing() -> bool:
    try:
        find_compiler()
    except KernelsMissing:
        return True
    return False


pytestmark = [
    pytest.mark.timeout(900),  # blocks.metal has 52 kernels
    pytest.mark.slow,
    pytest.mark.skipif(is_compiler_missing(), reason="needs pip install kvmux[metal-check]"),
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.metal")))
def test_kernels_need_hardly_more_than_the_table_says(name: str, architecture: str) -> None:
    table = read_table(TABLE.read_text(encoding="utf-8"))
    for types in list_type_sets(name):
        compiled = dict(compile_file(name, types, architecture))
        assert compiled
        for kernel, found in compiled.items():
            allowed = table[kernel][ARCHITECTURES.index(architecture)]
            is_within = all(n <= most + more for n, most, more in zip(found, allowed, SLACK, strict=True))
            assert is_within, f"{kernel} {types}: {found}, not {allowed}"
