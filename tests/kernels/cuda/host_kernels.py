"""Compiles the translated kernels by a C++ compiler, and launches them on the CPU as CUDA would on a GPU.

So the translation, the packing of parameters and the functions of metal_stdlib are tested without a GPU; neither
NVIDIA's compiler nor the GPU's memory are.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from functools import cache, partial
from pathlib import Path

import metal_emulator
from kernels.cuda import translation
from kernels.cuda.library import CudaLibrary, GetLauncher, Launcher, Size
from kernels.metal.backend import MetalOps
from kernels.metal.library import Kernels

HERE = Path(__file__).parent
FOLDERS = (HERE / "host", Path(translation.__file__).parent, Path(metal_emulator.__file__).parent / "runtime")
# Hidden, as threadgroup memory becomes static variables of templates, which libraries in one process would share
VISIBILITY = "-fvisibility=hidden"
OPTIONS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", VISIBILITY, "-w", "-include", "cuda_on_host.h")
_ENTRY_POINT = re.compile(r'extern "C" __global__ (?:__launch_bounds__\([^)]*\) )?void ([\w#]+)(\(.*?\) \{.*?; \})')


def load_host_ops() -> MetalOps:
    """Return the Metal operations on the CPU, as CUDA C++."""
    return MetalOps(Kernels(compile_shader))


def compile_shader(source: str) -> CudaLibrary:
    """Return the kernels of a Metal source, for tensors on the CPU."""
    return CudaLibrary(build(translation.translate(source)))


@cache
def build(source: str) -> GetLauncher:
    """Compile CUDA C++ for the CPU, and load it. Raises SyntaxError with the compiler's messages."""
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder, "kernels.so")
        compile_library(source, to)
        return partial(_get_launcher, ctypes.CDLL(str(to)))


def compile_library(source: str, to: Path) -> None:
    """Compile CUDA C++ to a library for the CPU, which has for each kernel NAME a function NAME_run."""
    source = _ENTRY_POINT.sub(_make_host_entry_point, source)
    options = (*OPTIONS, *(f"-I{each}" for each in FOLDERS), "-x", "c++", "-", "-o", str(to))
    command = [*metal_emulator.Compiler.find().command, *options]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    if done.returncode:
        raise SyntaxError(done.stderr)


def _make_host_entry_point(found: re.Match[str]) -> str:
    """Return a kernel under another name, and a function with C linkage that launches it."""
    name, rest = found.groups()
    paste = "##" if "##" in name else ""  # within a macro
    entry, run = f"{name}{paste}_entry", f"{name}{paste}_run"
    sizes = "const unsigned* groups, const unsigned* size, void** given"
    launcher = f'extern "C" __attribute__((visibility("default"))) void {run}({sizes})'
    return f"void {entry}{rest} {launcher} {{ host::launch(&{entry}, groups, size, given); }}"


def _get_launcher(library: ctypes.CDLL, name: str) -> Launcher:
    try:
        run = getattr(library, f"{name}_run")
    except AttributeError:
        raise RuntimeError("the library does not have it") from None

    def launch(groups: Size, group_size: Size, parameters: int) -> None:
        run((ctypes.c_uint * 3)(*groups), (ctypes.c_uint * 3)(*group_size), ctypes.c_void_p(parameters))

    return launch
