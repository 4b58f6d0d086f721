"""Loads the Metal kernels for the NVIDIA GPU that torch uses."""

from __future__ import annotations

from functools import cache

import torch

from kernels.cuda.driver import load_module
from kernels.cuda.library import Library
from kernels.cuda.nvrtc import compile_source, find_compiler
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
    return MetalOps(Kernels(_compile_shader))


def _compile_shader(source: str) -> Library:
    major, minor = torch.cuda.get_device_capability()
    return Library(load_module(compile_source(translate(source), f"sm_{major}{minor}").cubin))
