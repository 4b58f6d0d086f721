"""Devices: a device's name in the settings, and the torch device of its tensors. Knows no kernel.

The two differ for an emulated GPU, whose tensors are on torch's spare device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch


class KernelsMissing(Exception):
    """Raised if this machine cannot run a backend's operations; the message says why, and what to do."""


EMULATED_DEVICES: Mapping[str, str] = {
    "metal-emulated": "privateuseone",
    "metal-checked": "privateuseone",
}  # emulated device: the torch device of its tensors


class Device(NamedTuple):
    """A device on which operations run: its name, and the torch device of its tensors."""

    name: str  # name of the device in the settings, in /v1/settings and in the log
    tensors: torch.device

    @property
    def is_emulated(self) -> bool:
        """Whether the device is an emulated GPU, used to try its kernels; it is never replaced by plain torch."""
        return self.name in EMULATED_DEVICES


def get_device(name: str) -> Device:
    """Return the device that has this name in the settings."""
    return Device(name, torch.device(EMULATED_DEVICES.get(name, name)))


def device_of(tensors: torch.device | str) -> Device:
    """Return the device whose tensors are on this torch device."""
    tensors = torch.device(tensors)
    return Device(tensors.type, tensors)


def fast_half_dtypes() -> frozenset[torch.dtype]:
    """Return the 16-bit dtypes for which this CPU has instructions; matrix products in the others are slow."""
    halves = {
        torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
        torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
    }
    has = torch.cpu.get_capabilities()
    return frozenset(dtype for dtype, names in halves.items() if any(has.get(name) for name in names))
