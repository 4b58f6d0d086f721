"""A device for the emulator's tensors: its operations run on the CPU, but it refuses what torch refuses on mps.

It is torch's spare device (`privateuseone`), so torch itself tells its tensors from those of the host, as on a Mac.
Some names that are imported from torch are private. They may change with torch's version, which is pinned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from metal_emulator.mps_operations import MpsKernel, find_mps_kernel

DEVICE = torch.device("privateuseone", 0)
_DISPATCH_KEY = "PrivateUse1"
_UNSUPPORTED_DTYPES = (torch.float64, torch.complex128)
# torch makes an empty tensor for these, which their kernel resizes. That is not possible here, so they create it on the
# CPU. For all other factories torch knows the size from the beginning.
_FACTORIES = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm")
# Operations whose tensors may be on two devices: copies, and those whose indices may be on the host
_COPIES = ("aten::copy_", "aten::_to_copy")
_INDEXED = ("aten::index", "aten::index_put_", "aten::_index_put_impl_")
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::linear")
# torch 2.13 gets a product wrong that sums more than _MAX_SUMMED numbers, if its other sizes are at least _MIN_OTHERS.
_MAX_SUMMED, _MIN_OTHERS = 32_766, 16


class DeviceTensor(Tensor):
    """A tensor on the emulated device; `host` is a tensor on the CPU with the same memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        if host.dtype in _UNSUPPORTED_DTYPES:
            raise TypeError(
                f"Cannot convert a MPS Tensor to {host.dtype} dtype as the MPS framework doesn't support it. "
                "Please use float32 instead."
            )
        tensor: DeviceTensor = Tensor._make_subclass(
            cls, host, False, dispatch_device=True, device_for_backend_keys=DEVICE
        )
        tensor.host = host
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch declares an attribute
        return DEVICE

    def tolist(self) -> Any:
        return self.host.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{repr(self.host).removesuffix(')')}, device='{DEVICE}')"

    def __format__(self, spec: str) -> str:
        return format(self.host, spec) if self.dim() == 0 else repr(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:  # type: ignore[override]
        return DEVICE if func is torch.ops.prim.device.default else _run(func, args, kwargs or {})


@cache
def register_device() -> Library:
    """Let torch create tensors on the device, which then exists until the process ends."""
    _setup_privateuseone_for_python_backend()
    library = Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, _DISPATCH_KEY)
    library.impl("empty_strided", _empty_strided, _DISPATCH_KEY)
    library.impl("_copy_from", _copy_from, _DISPATCH_KEY)
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, partial(_create, operation), _DISPATCH_KEY)
    return library


def _empty(size: Sequence[int], *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return DeviceTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any) -> Tensor:
    return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype))


def _create(operation: Any, *args: Any, **kwargs: Any) -> Tensor:
    return DeviceTensor(operation(*args, **kwargs | {"device": torch.device("cpu")}))


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    _to_host(to).copy_(_to_host(source))
    return to


# -------------------------------------------------------------------- operations
def _run(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the memory of its tensors. Raises what torch raises on mps."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if operation is torch.ops.aten._has_compatible_shallow_copy_type.default:  # called when a module moves
        return len({type(each) for each in tensors}) == 1
    _check_devices(operation, tensors)
    _check_copy(operation, args, kwargs)
    _check_product(operation, tensors)
    match MpsKernel.OWN if operation._schema.name in _COPIES else find_mps_kernel(operation):
        case MpsKernel.MISSING:
            raise NotImplementedError(f"The operator '{operation}' is not currently implemented for the MPS device.")
        case MpsKernel.COMPOSITE if (result := operation.decompose(*args, **kwargs)) is not NotImplemented:
            return result
    to = kwargs.get("device")
    on_device = to.type == DEVICE.type if to is not None else any(isinstance(each, DeviceTensor) for each in tensors)
    host_args, host_kwargs = tree_map(_to_host, (tuple(args), dict(kwargs)))
    if operation._schema.name == "aten::argmax":  # passes over NaN
        host_args = (host_args[0].nan_to_num(-torch.inf, torch.inf, -torch.inf), *host_args[1:])
    result = operation(*host_args, **host_kwargs)
    return tree_map(_to_device, result) if on_device else result


def _check_copy(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise RuntimeError for a copy after which the host's tensor is still read, when it may have changed."""
    if operation._schema.name in _COPIES and (kwargs.get("non_blocking") or args[2:] == (True,)):
        raise RuntimeError(f"{operation}: non_blocking copies read their source later, when it may have changed")


def _check_product(operation: Any, tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError for a product that torch gets wrong on M1 and M2 (pytorch#193487, pytorch#195163)."""
    if operation._schema.name not in _PRODUCTS:
        return
    left, right = tensors[-2:] if operation._schema.name == "aten::addmm" else tensors[:2]
    summed = left.shape[-1]
    if summed > _MAX_SUMMED and min(left.numel(), right.numel()) >= _MIN_OTHERS * summed:
        raise RuntimeError(f"{operation}: a sum of {summed} products is wrong on M1 and M2: at most {_MAX_SUMMED}")


def _check_devices(operation: Any, tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError for tensors of the host beside those of the device, except 0-dimensional ones (numbers)."""
    if operation._schema.name in (*_COPIES, *_INDEXED):
        return
    on_host = [each for each in tensors if not isinstance(each, DeviceTensor) and each.dim() > 0]
    if on_host and len(on_host) < len(tensors):
        raise RuntimeError(f"{operation}: expected all tensors to be on the same device, but found {DEVICE} and cpu")


def _to_host(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == DEVICE.type else value


def _to_device(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) else value
