"""The emulated device in the place of a Mac's: it goes by the name mps, and what the engine asks of it is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import backends
from kernels.device import Device, get_device
from kernels.metal.library import Kernel
from kernels.metal.runtime import load_emulated
from metal_emulator import DEVICE, register_device
from metal_emulator.device import DeviceTensor
from server.engine import build
from server.engine import device as choosing

aten = torch.ops.aten
MPS = Device("mps", DEVICE)
FREE_BYTES = 4 << 30
COPIES = {aten._to_copy.default, aten.copy_.default}
SIZED_BY_NUMBERS = {  # so the host waits for these numbers
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
}


class DeviceUse:
    """What the engine had to do with the device: what it waited for, what it copied there, and in which threads."""

    def __init__(self) -> None:
        self.to_host: list[str] = []  # what the host waited for
        self.to_device: list[str] = []
        self.threads: set[int] = set()

    def reset(self) -> None:
        """Count from zero again."""
        self.to_host.clear()
        self.to_device.clear()

    def record_thread(self) -> None:
        """Record that the current thread has used the device."""
        self.threads.add(threading.get_ident())

    def record(self, operation: Any, args: Any, kwargs: Any) -> None:
        """Record an operation that takes or returns a tensor of the device."""
        self.record_thread()
        if operation in COPIES:
            self._record_copy(operation, args, kwargs)
        elif operation is aten._local_scalar_dense.default or operation in SIZED_BY_NUMBERS:
            self.to_host.append(str(operation))
        elif operation._schema.name in ("aten::index", "aten::index_put_"):
            self._record_indices([indices for indices in args[1] if indices is not None])

    def _record_indices(self, indices: Iterable[Tensor]) -> None:
        """Count what indexing waits for: the number of a mask's elements, and indices that the host has."""
        for each in indices:
            if not isinstance(each, DeviceTensor):
                self.to_device.append("indices")
            elif each.dtype is torch.bool:
                self.to_host.append("a mask")

    def _record_copy(self, operation: Any, args: Any, kwargs: Any) -> None:
        source = args[1] if operation is aten.copy_.default else args[0]
        there = args[0].device if operation is aten.copy_.default else kwargs.get("device", source.device)
        if source.device.type != there.type:
            (self.to_device if there.type == DEVICE.type else self.to_host).append(str(operation))


@contextmanager
def emulated_mps() -> Iterator[DeviceUse]:
    """Let `device=mps` be the emulated device, with its kernels and FREE_BYTES bytes; yield what is asked of it.

    Neither the kernels nor the KV memory are checked, as tests of their own do that: it takes seconds.
    """
    register_device()
    use = DeviceUse()
    backends._check_backend.cache_clear()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) makes it on the host, and then copies it
    with pytest.MonkeyPatch.context() as patch:
        _count_operations(patch, use)
        _replace_mps(patch, use)
        patch.setattr(backends, "check_ops", lambda *_: [])
        patch.setattr(build, "find_memory_fault", lambda *_: None)
        yield use
    torch._C._set_only_lift_cpu_tensors(False)
    backends._check_backend.cache_clear()


def _count_operations(patch: pytest.MonkeyPatch, use: DeviceUse) -> None:
    """Report every operation and launch on the emulated device to `use`."""
    dispatch, launch = DeviceTensor.__torch_dispatch__, Kernel.__call__

    def run(cls: type, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is not torch.ops.prim.device.default:
            use.record(func, args, kwargs or {})
        return dispatch(func, types, args, kwargs)

    def tolist(self: DeviceTensor) -> Any:
        use.record_thread()
        use.to_host.append("tolist")
        return self.host.tolist()

    def call(self: Kernel, *args: Any) -> None:
        use.record_thread()
        launch(self, *args)

    patch.setattr(DeviceTensor, "__torch_dispatch__", classmethod(run))
    patch.setattr(DeviceTensor, "tolist", tolist)
    patch.setattr(Kernel, "__call__", call)


def _replace_mps(patch: pytest.MonkeyPatch, use: DeviceUse) -> None:
    """Replace torch's mps; to ask for its memory counts as using it."""

    def told(value: Any) -> Callable[..., Any]:
        return lambda *_: (use.record_thread(), value)[1]

    patch.setattr(choosing, "get_device", lambda name: MPS if name == "mps" else get_device(name))
    patch.setattr(backends, "BACKENDS", {**backends.BACKENDS, "metal": ("mps", load_emulated)})
    patch.setattr(torch.backends.mps, "is_available", told(True))
    patch.setattr(torch.mps, "recommended_max_memory", told(FREE_BYTES))
    patch.setattr(torch.mps, "driver_allocated_memory", told(0))
    patch.setattr(torch.mps, "set_per_process_memory_fraction", told(None))
    patch.setattr("kernels.tracing.SYNCHRONIZE", {DEVICE.type: told(None)})
