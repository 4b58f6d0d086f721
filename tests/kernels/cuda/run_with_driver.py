"""Calls operations through the product's loader and NVIDIA's bindings, in a process that finds another libcuda.so.1.

Prints an operation's largest error, line by line. test_driver.py starts it.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

from kernels.cuda.driver import load_module
from kernels.cuda.library import CudaLibrary
from kernels.cuda.translation import translate
from kernels.metal.backend import MetalOps
from kernels.metal.library import Kernels
from kernels.selfcheck.check import check_ops
from tests.kernels.cuda.host_kernels import compile_library
from tests.kernels.metal.mutation_testing import CPU


def main(folder: Path) -> None:
    names = count()

    def compile_shader(source: str) -> CudaLibrary:
        path = folder / f"kernels-{next(names)}.so"
        compile_library(translate(source), path)
        return CudaLibrary(load_module(f"{path}\0".encode()))

    stream = SimpleNamespace(cuda_stream=0)
    with (
        patch.object(torch.cuda, "synchronize", lambda: None),
        patch.object(torch.cuda, "current_stream", lambda: stream),
    ):
        for verdict in check_ops(MetalOps(Kernels(compile_shader)), torch.float32, CPU):
            print(verdict.op, verdict.fault)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
