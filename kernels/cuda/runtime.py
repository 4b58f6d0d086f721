"""Loads the Metal kernels for the NVIDIA GPU that torch uses."""

from __future__ import annotations

from functools import cache

import torch

from kernels.cuda.cubin_cache import get_cubin
from kernels.cuda.driver import load_module
from kernels.cuda.graphs import CudaGraphs, GraphOps
from kernels.cuda.library import CudaLibrary
from kernels.cuda.nvrtc import compile_source, describe_compiler, find_compiler
from kernels.cuda.translation import translate
from kernels.device import KernelsMissing
from kernels.metal.backend import MetalOps
from kernels.metal.library import Kernels


@cache  # keeps the compiled kernels
def load() -> MetalOps:
    """Return the operations on an NVIDIA GPU. Raises KernelsMissing if there is none, or no compiler for it."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise KernelsMissing("this machine has no NVIDIA GPU that torch can use")
    find_compiler()
    return GraphOps(Kernels(compile_shader), CudaGraphs())


def compile_shader(source: str) -> CudaLibrary:
    """Return the kernels of a Metal source, for tensors on the GPU that torch uses."""
    major, minor = torch.cuda.get_device_capability()
    architecture, translated = f"sm_{major}{minor}", translate(source)
    key = describe_compiler(), architecture, translated
    return CudaLibrary(load_module(get_cubin(key, lambda: compile_source(translated, architecture).cubin)))
