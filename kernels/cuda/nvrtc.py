"""Compiles CUDA C++ by NVRTC, NVIDIA's compiler as a library, through its Python bindings. Needs no GPU.

torch's CUDA builds bring the library, the headers and the bindings. torch's own `torch.cuda._compile_kernel` does not
serve: it compiles one kernel at a time, without conversions from and to 16-bit floats, and passes no structs.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from kernels.cuda.bindings import get_result
from kernels.device import KernelsMissing

FOLDER = Path(__file__).parent
HEADER = "cuda_fp16.h"
HOW_TO_INSTALL = "install torch's CUDA build, which brings it"
OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    "--split-compile=0",  # in as many threads as there are processors
    "--ptxas-options=-v",  # the log says what each kernel needs
    "--diag-suppress=177",  # a declared function or variable is not used
)


class Compiled(NamedTuple):
    """The machine code of a source's kernels, and what the compiler says about them."""

    cubin: bytes
    log: str


def find_compiler() -> tuple[Any, Path]:
    """Return the bindings of NVRTC, and the folder of CUDA's headers. Raises KernelsMissing if there are none."""
    try:
        nvrtc = import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()  # loads the library
    except (ImportError, RuntimeError) as error:  # the latter's subclass is raised if the library is not found
        raise KernelsMissing(f"CUDA's compiler NVRTC is missing ({error}): {HOW_TO_INSTALL}") from None
    folder = next((each for each in _list_header_folders() if (each / HEADER).exists()), None)
    if folder is None:
        raise KernelsMissing(f"CUDA's header {HEADER} is missing: {HOW_TO_INSTALL}, or set CUDA_HOME")
    return nvrtc, folder


def describe_compiler() -> str:
    """Return what machine code depends on beside the source and the architecture, as a text."""
    nvrtc, _ = find_compiler()
    return repr((nvrtc.nvrtcVersion()[1:], OPTIONS, (FOLDER / "metal_stdlib").read_text(encoding="ascii")))


def _list_header_folders() -> Iterator[Path]:
    """Yield where CUDA's headers may be: in NVIDIA's packages, and in an installation of CUDA."""
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages and packages.submodule_search_locations) or ():
        yield from sorted(Path(folder).glob("*/include"))
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield Path(home) / "include"


def compile_source(source: str, architecture: str) -> Compiled:
    """Compile CUDA C++ for an architecture such as sm_90.

    Raises SyntaxError with the compiler's messages, and KernelsMissing if there is no compiler.
    """
    nvrtc, headers = find_compiler()
    options = [f"--gpu-architecture={architecture}", *OPTIONS, f"-I{FOLDER}", f"-I{headers}"]
    program = get_result("NVRTC", nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, None, None))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytearray(get_result("NVRTC", nvrtc.nvrtcGetProgramLogSize(program)))
        get_result("NVRTC", nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0").decode()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise SyntaxError(f"NVRTC refuses the kernels for {architecture}: {status.name}\n{text}")
        cubin = bytearray(get_result("NVRTC", nvrtc.nvrtcGetCUBINSize(program)))
        get_result("NVRTC", nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(bytes(cubin), text)
