"""A device of type mps on any machine: it computes on the CPU, and counts what a real one would have to wait for.

Its tensors say that they are on "mps:0"; each holds a tensor of the CPU. What mixes them with the host's tensors, wants
float64 or would read their memory from the host fails as it does on a Mac. Knows nothing of how fast anything is.
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
FAR = torch.device("mps:0")  # with its number: torch would ask Metal for that of "mps"
COPIES = {aten._to_copy, aten.to, aten.copy_}
SIZED_BY_NUMBERS = {  # so the host waits for these numbers
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
}


class FarTensor(Tensor):
    """A tensor on the device."""

    near: Tensor  # where its numbers really are
    home: FarDevice
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near: Tensor, home: FarDevice) -> FarTensor:
        if near.dtype is torch.float64:
            raise TypeError("the MPS framework does not support float64")
        far = torch.Tensor._make_wrapper_subclass(
            cls, near.size(), near.stride(), near.storage_offset(), dtype=near.dtype, device=FAR
        )
        far.near, far.home = near, home
        return far

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called where the mode is off: in other threads than the one that entered it."""
        home = next(leaf.home for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FarTensor))
        return home.computed(func, args, kwargs or {})

    # Methods that torch begins by making the device the current one, which there is not.
    def __getitem__(self, key: Any) -> Any:
        self.home.indexed(key)
        return FarTensor(self.near[_near(key)], self.home)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.home.indexed(key)
        self.near[_near(key)] = _near(value)

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Any:
        assert not non_blocking, "on mps others read the source later, when it may be gone"
        return self.home.computed(aten.copy_.default, (self, source), {})

    def __invert__(self) -> Any:
        return self.home.computed(aten.bitwise_not.default, (self,), {})

    def __int__(self) -> int:
        return int(self.item())

    def nonzero(self) -> Any:
        return self.home.computed(aten.nonzero.default, (self,), {})

    def tolist(self) -> list[Any]:
        self.home.reached()
        self.home.to_host.append("tolist")
        return self.near.tolist()

    def data_ptr(self) -> int:
        return self.near.data_ptr()


class FarDevice(TorchDispatchMode):
    """While it is entered, there is such a device."""

    def __init__(self) -> None:
        super().__init__()
        self.to_host: list[str] = []  # what the host waited for
        self.to_device: list[str] = []
        self.threads: set[int] = set()  # that had anything to do with the device

    def __enter__(self) -> FarDevice:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) makes it here, and then copies it
        super().__enter__()
        return self

    def __exit__(self, *how: Any) -> None:
        super().__exit__(*how)
        torch._C._set_only_lift_cpu_tensors(False)

    def forget(self) -> None:
        """Counts from now on."""
        self.to_host.clear()
        self.to_device.clear()

    def reached(self) -> None:
        """By this thread."""
        self.threads.add(threading.get_ident())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, FarTensor) or leaf == FAR for leaf in tree_leaves((args, kwargs))):
            return self.computed(func, args, kwargs)
        return func(*args, **kwargs)

    def computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation on what the tensors hold; its result is on the device, if it is no copy for the host."""
        self.reached()
        if func.overloadpacket in COPIES:
            leaves = not self._copied(func, args, kwargs)
        else:
            self._waited(func, args, kwargs)
            leaves = False
        near_args, near_kwargs = _near((args, kwargs))
        if func is aten.argmax.default:  # a Mac's passes over NaN
            near_args = (near_args[0].nan_to_num(-torch.inf, torch.inf, -torch.inf), *near_args[1:])
        found = func(*near_args, **near_kwargs)
        return found if leaves else tree_map_only(Tensor, lambda near: FarTensor(near, self), found)

    def indexed(self, key: Any) -> None:
        """A mask waits for its numbers; a list, or a tensor of the host, is copied."""
        self.reached()
        for each in key if isinstance(key, tuple) else (key,):
            if isinstance(each, Tensor) and each.dtype is torch.bool:
                self.to_host.append("a mask")
            elif isinstance(each, list) or (isinstance(each, Tensor) and not isinstance(each, FarTensor)):
                self.to_device.append("indices")

    def _copied(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Counts it, and says whether the copy is on the device."""
        source, *more = args if func is not aten.copy_.default else (args[1], args[0].device)
        targets = [leaf for leaf in tree_leaves((more, kwargs)) if isinstance(leaf, torch.device)]
        there = isinstance(source, FarTensor) if not targets else targets[0] == FAR
        if isinstance(source, FarTensor) is not there:
            (self.to_device if there else self.to_host).append(str(func))
        return there

    def _waited(self, func: Any, args: Any, kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        host = [each for each in tensors if not isinstance(each, FarTensor) and each.ndim]
        if func is aten.index.Tensor_out:
            self.indexed(tuple(args[1]))
        elif func is aten._local_scalar_dense.default or func in SIZED_BY_NUMBERS:
            self.to_host.append(str(func))
        elif host:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found mps:0 and cpu")


def _near(values: Any) -> Any:
    """The same on the CPU."""
    values = tree_map_only(FarTensor, lambda far: far.near, values)
    return tree_map_only(torch.device, lambda _: torch.device("cpu"), values)


def offered(patch: Any, home: FarDevice, *, free: int = 4 << 30) -> None:
    """Has the settings' mps mean this device, with so many bytes free; whoever asks for those reaches it."""

    def told(value: Any) -> Callable[..., Any]:
        return lambda *_: (home.reached(), value)[1]

    patch.setattr(choosing, "named", lambda name: Device(name, FAR if name == "mps" else torch.device("cpu")))
    patch.setattr(torch.backends.mps, "is_available", told(True))
    patch.setattr(torch.mps, "recommended_max_memory", told(free))
    patch.setattr(torch.mps, "driver_allocated_memory", told(0))
    patch.setattr(torch.mps, "set_per_process_memory_fraction", told(None))
    patch.setattr("kernels.tracing.WAITS", {FAR.type: told(None)})
