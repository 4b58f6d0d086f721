"""Where and how precisely to compute: turns `auto` into a device and dtypes, and says how much memory is free."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import psutil
import torch

from config.errors import SettingsError
from config.settings import Settings
from kernels.device import EMULATED_DEVICES, Device, fast_half_dtypes, get_device
from server.models.errors import ModelError
from server.models.files.user_cache import expand_user, user_cache_dir
from server.models.weights import WeightFormat, WeightsConfig
from server.records import DeviceMemory

log = logging.getLogger(__name__)

CORES = torch.get_num_threads()  # as torch finds them, OMP_NUM_THREADS included
SMALL_MODEL_BYTES = 16 << 20  # bytes of a model whose step is too short to be shared
METAL_MARGIN = 256 << 20  # bytes that stay free on mps: attention's scratch, command buffers, the allocator's rounding
WEIGHT_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
WEIGHT_FORMATS = {"int8": WeightFormat(8), "int4": WeightFormat(4, 32)}  # docs/guide/models.md has what they cost


def choose_device(wanted: str) -> Device:
    """Return the device to use; "auto" takes none that is emulated. Raises SettingsError if torch cannot use it."""
    usable = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        wanted = next(name for name, there in usable.items() if there)
    if wanted not in EMULATED_DEVICES and not usable[wanted]:
        there = ", ".join(name for name, yes in usable.items() if yes)
        raise SettingsError(f"device {wanted!r} is not usable here; torch offers {there}")
    return get_device(wanted)


def choose_dtype(wanted: str, checkpoint: str, device: Device) -> torch.dtype:
    """Return the dtype of activations, keys and values.

    "auto" is the checkpoint's, but float32 on a CPU that would emulate it.
    """
    if wanted == "auto":
        wanted = checkpoint
        if device.name == "cpu" and not (wanted == "bfloat16" and torch.bfloat16 in fast_half_dtypes()):
            wanted = "float32"
    dtype = getattr(torch, wanted, None)
    if dtype not in WEIGHT_DTYPES.values():
        raise SettingsError(f"the checkpoint's dtype {wanted!r} is none to compute in: give --dtype")
    assert isinstance(dtype, torch.dtype)
    return dtype


def choose_weight_format(settings: Settings, dtype: torch.dtype) -> WeightsConfig:
    """Return how weights are kept under activations of `dtype`."""
    if settings.weights in WEIGHT_DTYPES:
        return WeightsConfig(WEIGHT_DTYPES[settings.weights])
    format = WEIGHT_FORMATS.get(settings.weights)
    return WeightsConfig(
        dtype, format, as_stored=True, cache_dir=_find_weights_cache_dir(settings.weights_cache) if format else None
    )


def _find_weights_cache_dir(wanted: str | None) -> Path | None:
    """Return the folder where quantized weights are kept; None if they are not."""
    if wanted is not None:
        return None if wanted in ("", "off") else expand_user(wanted)
    try:
        return user_cache_dir() / "weights"
    except ModelError as error:
        log.warning("the next start has to quantize the weights again, as nothing can be kept: %s", error)
        return None


def choose_threads(wanted: int | None, weight_bytes: int) -> int:
    """Return the number of CPU threads of the engine.

    A model that the memory has to bring anew for each step is worth every core. A small one leaves a core to HTTP:
    threads that wait for each other by spinning then lose more than one core gives.
    """
    return wanted or (CORES if weight_bytes > SMALL_MODEL_BYTES else max(1, CORES - 1))


def choose_max_batched_tokens(wanted: int | None, device: Device) -> int:
    """Return the largest number of prompt tokens of a step.

    While a step runs nobody hears anything. A CPU is as busy with 512 tokens as with more, and a tenth less with half
    of them, as all weights pass through its caches once a step; what is emulated runs on one; an accelerator is not.
    """
    return wanted or (512 if device.tensors.type == "cpu" else 1024)


# -------------------------------------------------------------------- memory
def device_memory(device: torch.device) -> DeviceMemory:
    """Return the bytes used and free now, by all processes together."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total - free, free)
    if device.type == "mps":
        used = torch.mps.driver_allocated_memory()
        return DeviceMemory(used, max(0, torch.mps.recommended_max_memory() - used))
    machine = psutil.virtual_memory()
    limit, used = _container_memory()
    if limit < machine.total:
        return DeviceMemory(used, min(limit - used, machine.available))
    return DeviceMemory(machine.total - machine.available, machine.available)


def free_memory(device: torch.device) -> int:
    """Return the bytes that may be allocated now.

    On mps a margin stays: a Mac whose Metal runs out of memory may panic.
    """
    free = device_memory(device).free
    return max(0, free - METAL_MARGIN) if device.type == "mps" else free


def limit_memory(device: torch.device) -> None:
    """Make torch raise above the memory that Metal recommends; by default it takes 1.7 times as much."""
    if device.type == "mps":
        torch.mps.set_per_process_memory_fraction(1.0)


def _container_memory() -> tuple[int, int]:
    """Return the limit of the container (cgroup v2), which the host's figures do not show, and the bytes used of it."""
    cgroup = Path("/sys/fs/cgroup")
    try:
        return int((cgroup / "memory.max").read_text()), int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return sys.maxsize, 0
