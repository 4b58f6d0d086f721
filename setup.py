"""Builds the C++ kernels, if there is a compiler and torch to build them against; without them the server runs, slower.

Everything else about the package stands in pyproject.toml. A library is built for the fastest instruction set that this
machine can run; with INSTRUCTION_SETS=others in the environment for those that it can run as well, as tests do, and
with INSTRUCTION_SETS=all for each that the compiler knows, for other machines.
"""

import os
import platform
import runpy
import sys
from copy import copy
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.errors import CompileError

SOURCES = Path("kernels/cpu")
FLAGS = [
    "-O3",
    "-g0",  # Python's own flags ask for what a debugger wants, which is 25 times as much to write
    "-std=c++20",
    "-ffp-contract=off",  # a function has the same bits wherever it is inlined; sums are fused where they say so
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",
    "-Wno-aggressive-loop-optimizations",  # a loop that is cut away once its count is known
]  # GCC 12 warns of its own headers and torch's
AVX512 = [
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c"),
    *("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"),
]
AVX512_BF16 = [*AVX512, "-mavx512bf16"]
INSTRUCTION_SETS = {
    "x86_64": {
        "avx2": ["-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"],
        "avx512": AVX512,
        "avx512_bf16": AVX512_BF16,
        "amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    },
    "aarch64": {"neon": ["-DCPU_CAPABILITY=DEFAULT"]},
}


def kernels() -> dict[str, Any]:
    """Return the arguments of setup() that build the kernels; none where torch is not installed."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:  # an isolated build: a second torch of gigabytes would be fetched for it
        return {}
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    known = INSTRUCTION_SETS.get(machine, {})
    if (which := os.environ.get("INSTRUCTION_SETS", "best")) != "all":
        usable = runpy.run_path(str(SOURCES / "instruction_sets.py"))["usable_instruction_sets"]()
        known = {name: known[name] for name in (usable[1:] if which == "others" else usable[:1]) if name in known}
    mac = sys.platform == "darwin"  # whose compiler has no OpenMP: one thread

    class Build(BuildExtension):  # type: ignore[misc]
        def run(self) -> None:
            try:
                super().run()
            except (Exception, SystemExit) as error:
                print(f"kvmux: the C++ kernels were not built ({error}); plain torch is used instead", file=sys.stderr)

        def build_extension(self, ext: Any) -> None:
            """Build a library, with objects of its own: the same sources are compiled for others, too."""
            apart = copy(self)
            apart.build_temp = str(Path(self.build_temp) / ext.name)
            try:
                super(Build, apart).build_extension(ext)
            except RuntimeError as error:  # of ninja; setuptools goes on without a library only after its own
                raise CompileError(str(error)) from error

    return {
        "ext_modules": [
            CppExtension(
                f"kernels.cpu._{name}",
                [str(source) for source in sorted(SOURCES.glob("*.cpp"))],
                depends=[str(header) for header in SOURCES.glob("*.h")],
                extra_compile_args=[*FLAGS, *([] if mac else ["-fopenmp"]), *flags, f"-DKVMUX_LIBRARY=kvmux_{name}"],
                extra_link_args=[] if mac else [_openmp()],
                optional=True,  # a compiler that does not know the newest instructions still builds the others
            )
            for name, flags in known.items()
        ],
        "cmdclass": {"build_ext": Build.with_options(no_python_abi_suffix=True)},
    }


def _openmp() -> str:
    """Return the link argument for torch's own OpenMP runtime; a second one would bring a second pool of threads."""
    import torch

    folder = Path(torch.__file__).parent
    found = [*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")]
    return str(found[0]) if found else "-fopenmp"


setup(**kernels())
