"""The devices on which engines are tested: all that this machine has, the emulated one included."""

from __future__ import annotations

import torch

from kernels.backends import list_backends

DEVICES = [
    "cpu",
    *{each.device.name for each in list_backends("metal-emulated") if each.missing is None},
    *(["cuda"] if torch.cuda.is_available() else []),
]
