"""What a device is: the word people use for it, and where its tensors live. Knows no kernel.

The two differ where a device is emulated: its operations are a GPU's, its tensors live on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch


class KernelsMissing(Exception):
    """There are no such operations on this machine; the message says why, and what would help."""


EMULATED_DEVICES: Mapping[str, str] = {
    "metal-emulated": "cpu",
    "metal-checked": "cpu",
}  # by name: where their tensors live


class Device(NamedTuple):
    """Where operations run."""

    name: str  # as in the settings, in /v1/settings and in the log
    tensors: torch.device

    @property
    def is_emulated(self) -> bool:
        """Whether it exists for its kernels alone: plain torch is no replacement for them."""
        return self.name in EMULATED_DEVICES


def get_device(name: str) -> Device:
    """Return the device of that name."""
    return Device(name, torch.device(EMULATED_DEVICES.get(name, name)))


def device_of(tensors: torch.device | str) -> Device:
    """Return the device that computes where these tensors live."""
    tensors = torch.device(tensors)
    return Device(tensors.type, tensors)


def fast_half_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes of 16 bits that this CPU has instructions for; products of others are slow."""
    halves = {
        torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
        torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
    }
    has = torch.cpu.get_capabilities()
    return frozenset(dtype for dtype, names in halves.items() if any(has.get(name) for name in names))
