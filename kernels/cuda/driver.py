"""Loads machine code into the GPU that torch uses, and launches its kernels on torch's current stream."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from kernels.cuda.bindings import get_result
from kernels.cuda.library import GetLauncher, Launcher, Size


def load_module(cubin: bytes) -> GetLauncher:
    """Return a function that gives, for a kernel's name, what launches it. The code stays loaded from then on."""
    driver = import_module("cuda.bindings.driver")
    torch.cuda.synchronize()  # makes torch's context the current one of this thread
    module = get_result("CUDA", driver.cuModuleLoadData(cubin))

    def get_launcher(name: str) -> Launcher:
        function = get_result("CUDA", driver.cuModuleGetFunction(module, name.encode()))
        return partial(_launch, driver, function)

    return get_launcher


def _launch(driver: Any, function: Any, groups: Size, group_size: Size, parameters: int) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    get_result("CUDA", driver.cuLaunchKernel(function, *groups, *group_size, 0, stream, parameters, 0))
