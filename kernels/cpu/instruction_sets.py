"""Tells which instruction sets this machine can run: setup.py builds a library for each, library.py loads the best.

setup.py runs this file by itself, before the package is installed, so it imports nothing of the project.
"""

import platform

import torch

INSTRUCTION_SETS = ("amx", "avx512_bf16", "avx512", "avx2", "neon")  # the fastest first
# CPU features that a library is compiled for in addition to AVX-512. The first processors with AVX-512 have no VNNI:
# they run AVX2.
AVX512 = ("avx512_vnni",)
AVX512_BF16 = (*AVX512, "avx512_bf16")
FEATURES = {"amx": (*AVX512_BF16, "amx_tile", "amx_bf16", "amx_int8"), "avx512_bf16": AVX512_BF16, "avx512": AVX512}


def usable_instruction_sets() -> tuple[str, ...]:
    """Return this machine's instruction sets, the fastest first; none above ATEN_CPU_CAPABILITY, if that is set."""
    if platform.machine() in ("aarch64", "arm64"):
        return ("neon",)
    if (best := torch.backends.cpu.get_cpu_capability()) != "AVX512":
        return ("avx2",) if best == "AVX2" else ()
    has = torch.cpu.get_capabilities()
    return *(name for name, features in FEATURES.items() if all(map(has.get, features))), "avx2"
