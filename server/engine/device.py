"""Chooses the device, dtypes and thread count where the settings say `auto`, and reads how much memory is free."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil
import torch

from config.errors import SettingsError
from config.settings import Settings
from kernels.device import EMULATED_DEVICES, Device, fast_half_dtypes, get_device
from server.models.errors import ModelError
from server.models.files.user_cache import expand_user, user_cache_dir
from server.models.weights import WeightFormat, WeightsConfig
from server.processes.cgroups import count_processors, read_memory_limit
from server.records import DeviceMemory

log = logging.getLogger(__name__)

# torch's default number of threads respects OMP_NUM_THREADS, but no quota
CORES = min(torch.get_num_threads(), count_processors())
SMALL_MODEL_BYTES = 16 << 20  # bytes; a model with weights of up to this size leaves one core to the API workers
# Bytes that stay free on mps, for attention's scratch, command buffers and the allocator's rounding
METAL_MARGIN = 256 << 20
WEIGHT_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Names of the setting `weights` and their formats; docs/guide/models.md compares their accuracy
WEIGHT_FORMATS = {
    each.name: each for each in (WeightFormat("int8", "Q8_0", "Q8_0"), WeightFormat("int4", "Q4_K", "Q6_K"))
}


def choose_device(name: str) -> Device:
    """Return the device of a name; "auto" is the first of cuda, mps and cpu on which torch can allocate memory.

    Raises SettingsError if torch cannot use the device on this machine.
    """
    available = [*_list_accelerators(), "cpu"]
    if name == "auto":
        return next(device for device in map(get_device, available) if _can_allocate(device))
    if name not in (*EMULATED_DEVICES, *available):
        raise SettingsError(f"device {name!r} is not usable here; torch offers {', '.join(available)}")
    return get_device(name)


def _list_accelerators() -> list[str]:
    """Return the names of this machine's accelerators, as torch tells them."""
    usable = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [name for name, is_usable in usable.items() if is_usable]


def _can_allocate(device: Device) -> bool:
    """Return whether torch can allocate on a device that it says is available; virtual Macs have an mps without memory.

    A failure is logged.
    """
    try:
        limit_memory(device)
        torch.zeros(1, device=device.tensors)
    except (RuntimeError, AssertionError) as error:  # torch raises either for a device that it cannot use
        log.warning("torch cannot allocate memory on %s, so another device is taken: %s", device.name, error)
        return False
    return True


def choose_dtype(name: str, checkpoint: str, device: Device) -> torch.dtype:
    """Return the dtype of activations, keys and values.

    "auto" is the checkpoint's dtype, but float32 on a CPU without instructions for that dtype. Raises SettingsError if
    the checkpoint's dtype is not supported.
    """
    if name == "auto":
        name = checkpoint
        if device.name == "cpu" and not (name == "bfloat16" and torch.bfloat16 in fast_half_dtypes()):
            name = "float32"
    dtype = getattr(torch, name, None)
    if dtype not in WEIGHT_DTYPES.values():
        raise SettingsError(f"the checkpoint's dtype {name!r} is not supported for computing: set --dtype")
    assert isinstance(dtype, torch.dtype)
    return dtype


def choose_weight_format(settings: Settings, dtype: torch.dtype) -> WeightsConfig:
    """Return the format in which weights are stored, for activations of `dtype`."""
    if settings.weights in WEIGHT_DTYPES:
        return WeightsConfig(WEIGHT_DTYPES[settings.weights])
    format = WEIGHT_FORMATS.get(settings.weights)
    return WeightsConfig(
        dtype, format, as_stored=True, cache_dir=_find_weights_cache_dir(settings.weights_cache) if format else None
    )


def _find_weights_cache_dir(setting: str | None) -> Path | None:
    """Return the folder in which quantized weights are cached; None if they are not cached (setting "off")."""
    if setting is not None:
        return None if setting in ("", "off") else expand_user(setting)
    try:
        return user_cache_dir() / "weights"
    except ModelError as error:
        log.warning("quantized weights cannot be cached, so the next start has to quantize them again: %s", error)
        return None


def choose_threads(setting: int | None, weight_bytes: int) -> int:
    """Return the number of CPU threads of the engine; `setting` if it is given.

    A model whose weights are read from memory in each step uses all cores. A small model leaves one core to the API
    workers: if these compete with its threads, which spin while they wait for each other, more than a core is lost.
    """
    return setting or (CORES if weight_bytes > SMALL_MODEL_BYTES else max(1, CORES - 1))


def choose_max_batched_tokens(setting: int | None, device: Device) -> int:
    """Return the maximum number of prompt tokens in a step; `setting` if it is given.

    Longer steps delay the tokens of all running requests. On a CPU (emulated devices included) 512 tokens per step
    reach the full throughput and 256 nine tenths of it, as each step reads all weights. An accelerator needs more.
    """
    return setting or (512 if device.tensors.type == "cpu" or device.is_emulated else 1024)


# -------------------------------------------------------------------- memory
def device_memory(device: Device) -> DeviceMemory:
    """Return how much of a device's memory all processes (on mps: this one) use now, and how much is free, in bytes."""
    if device.name == "cuda":
        free, total = torch.cuda.mem_get_info(device.tensors)
        return DeviceMemory(total - free, free)
    if device.name == "mps":
        used = torch.mps.driver_allocated_memory()
        return DeviceMemory(used, max(0, torch.mps.recommended_max_memory() - used))
    machine, limit = psutil.virtual_memory(), read_memory_limit()
    if limit is not None and limit.total < machine.total:
        return DeviceMemory(limit.used, min(limit.free, machine.available))
    return DeviceMemory(machine.total - machine.available, machine.available)


def free_memory(device: Device) -> int:
    """Return the number of bytes that may be allocated now.

    On mps a margin stays free: macOS may panic if Metal runs out of memory.
    """
    free = device_memory(device).free
    return max(0, free - METAL_MARGIN) if device.name == "mps" else free


def limit_memory(device: Device) -> None:
    """Let torch allocate on mps no more memory than Metal recommends; by default torch allows 1.7 times as much.

    The low watermark, from which on torch commits more often, must not be above: torch's is 1.4 times as much. torch
    reads it when it allocates for the first time.
    """
    if device.name == "mps":
        os.environ.setdefault("PYTORCH_MPS_LOW_WATERMARK_RATIO", "1.0")
        torch.mps.set_per_process_memory_fraction(1.0)
