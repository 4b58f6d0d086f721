"""A fake MPS device for any machine: it computes on the CPU, and counts the synchronizations of a real one.

Its tensors have the device "mps:0", and each holds a CPU tensor. Operations that mix them with host tensors, need
float64 or read their memory from the host fail as on a Mac. Says nothing about speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kernels.device import Device
from server.engine import device as choosing

aten = torch.ops.aten
MPS = torch.device("mps:0")  # with its number: torch would ask Metal for that of "mps"
COPIES = {aten._to_copy, aten.to, aten.copy_}
SIZED_BY_NUMBERS = {  # so the host waits for these numbers
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
}


class FakeMpsTensor(Tensor):
    """A tensor on the device."""

    on_cpu: Tensor  # where its numbers really are
    mps: FakeMps
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, on_cpu: Tensor, mps: FakeMps) -> FakeMpsTensor:
        if on_cpu.dtype is torch.float64:
            raise TypeError("the MPS framework does not support float64")
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, on_cpu.size(), on_cpu.stride(), on_cpu.storage_offset(), dtype=on_cpu.dtype, device=MPS
        )
        tensor.on_cpu, tensor.mps = on_cpu, mps
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called where the mode is off: in other threads than the one that entered it."""
        mps = next(leaf.mps for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeMpsTensor))
        return mps.compute(func, args, kwargs or {})

    # Methods that torch begins by making the device the current one, which there is not.
    def __getitem__(self, key: Any) -> Any:
        self.mps.record_indexing(key)
        return FakeMpsTensor(self.on_cpu[_to_cpu(key)], self.mps)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.mps.record_indexing(key)
        self.on_cpu[_to_cpu(key)] = _to_cpu(value)

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Any:
        assert not non_blocking, "on mps others read the source later, when it may be gone"
        return self.mps.compute(aten.copy_.default, (self, source), {})

    def __invert__(self) -> Any:
        return self.mps.compute(aten.bitwise_not.default, (self,), {})

    def __int__(self) -> int:
        return int(self.item())

    def nonzero(self) -> Any:
        return self.mps.compute(aten.nonzero.default, (self,), {})

    def tolist(self) -> list[Any]:
        self.mps.record_thread()
        self.mps.to_host.append("tolist")
        return self.on_cpu.tolist()

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()


class FakeMps(TorchDispatchMode):
    """A context in which torch has a fake MPS device."""

    def __init__(self) -> None:
        super().__init__()
        self.to_host: list[str] = []  # what the host waited for
        self.to_device: list[str] = []
        self.threads: set[int] = set()  # that had anything to do with the device

    def __enter__(self) -> FakeMps:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) makes it here, and then copies it
        super().__enter__()
        return self

    def __exit__(self, *how: Any) -> None:
        super().__exit__(*how)
        torch._C._set_only_lift_cpu_tensors(False)

    def reset(self) -> None:
        """Count from zero again."""
        self.to_host.clear()
        self.to_device.clear()

    def record_thread(self) -> None:
        """Record that the current thread has used the device."""
        self.threads.add(threading.get_ident())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, FakeMpsTensor) or leaf == MPS for leaf in tree_leaves((args, kwargs))):
            return self.compute(func, args, kwargs)
        return func(*args, **kwargs)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute the operation on the CPU; the result is on the device unless it is a copy to the host."""
        self.record_thread()
        if func.overloadpacket in COPIES:
            leaves = not self._record_copy(func, args, kwargs)
        else:
            self._record_wait(func, args, kwargs)
            leaves = False
        cpu_args, cpu_kwargs = _to_cpu((args, kwargs))
        if func is aten.argmax.default:  # a Mac's passes over NaN
            cpu_args = (cpu_args[0].nan_to_num(-torch.inf, torch.inf, -torch.inf), *cpu_args[1:])
        found = func(*cpu_args, **cpu_kwargs)
        return found if leaves else tree_map_only(Tensor, lambda on_cpu: FakeMpsTensor(on_cpu, self), found)

    def record_indexing(self, key: Any) -> None:
        """Count the synchronizations of indexing: a mask waits for its number of elements; lists are copied."""
        self.record_thread()
        for each in key if isinstance(key, tuple) else (key,):
            if isinstance(each, Tensor) and each.dtype is torch.bool:
                self.to_host.append("a mask")
            elif isinstance(each, list) or (isinstance(each, Tensor) and not isinstance(each, FakeMpsTensor)):
                self.to_device.append("indices")

    def _record_copy(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Count a copy, and return whether its result is on the device."""
        source, *more = args if func is not aten.copy_.default else (args[1], args[0].device)
        targets = [leaf for leaf in tree_leaves((more, kwargs)) if isinstance(leaf, torch.device)]
        there = isinstance(source, FakeMpsTensor) if not targets else targets[0] == MPS
        if isinstance(source, FakeMpsTensor) is not there:
            (self.to_device if there else self.to_host).append(str(func))
        return there

    def _record_wait(self, func: Any, args: Any, kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        host = [each for each in tensors if not isinstance(each, FakeMpsTensor) and each.ndim]
        if func is aten.index.Tensor_out:
            self.record_indexing(tuple(args[1]))
        elif func is aten._local_scalar_dense.default or func in SIZED_BY_NUMBERS:
            self.to_host.append(str(func))
        elif host:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found mps:0 and cpu")


def _to_cpu(values: Any) -> Any:
    """Return the values with the fake device's tensors replaced by those of the CPU."""
    values = tree_map_only(FakeMpsTensor, lambda tensor: tensor.on_cpu, values)
    return tree_map_only(torch.device, lambda _: torch.device("cpu"), values)


def install(patch: Any, mps: FakeMps, *, free: int = 4 << 30) -> None:
    """Make the setting `device=mps` use this device, with `free` bytes; querying its memory counts as using it."""

    def told(value: Any) -> Callable[..., Any]:
        return lambda *_: (mps.record_thread(), value)[1]

    patch.setattr(choosing, "get_device", lambda name: Device(name, MPS if name == "mps" else torch.device("cpu")))
    patch.setattr(torch.backends.mps, "is_available", told(True))
    patch.setattr(torch.mps, "recommended_max_memory", told(free))
    patch.setattr(torch.mps, "driver_allocated_memory", told(0))
    patch.setattr(torch.mps, "set_per_process_memory_fraction", told(None))
    patch.setattr("kernels.tracing.SYNCHRONIZE", {MPS.type: told(None)})
