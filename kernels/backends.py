"""Chooses a backend (the operations) for a device, and checks it. To add a backend, add a row to BACKENDS."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Literal, NamedTuple

import torch

from kernels.cpu import library as cpu
from kernels.cpu.instruction_sets import INSTRUCTION_SETS
from kernels.cuda import runtime as cuda
from kernels.device import Device, KernelsMissing, get_device
from kernels.metal import runtime as metal
from kernels.ops import DTYPES, OP_NAMES, Ops
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.check import Verdict, check_ops, replace_faulty

log = logging.getLogger(__name__)
REFERENCE = "reference"

# For each backend's name: its device, and a function that loads its operations or raises KernelsMissing. Those for the
# same device are in order of speed, the fastest first.
BACKENDS: Mapping[str, tuple[str, Callable[[], Ops]]] = {
    **{f"cpu-{name}": ("cpu", partial(cpu.load, name)) for name in INSTRUCTION_SETS},
    "metal": ("mps", metal.load),
    "metal-emulated": ("metal-emulated", partial(metal.load_emulated, checked=False)),
    "metal-checked": ("metal-checked", partial(metal.load_emulated, checked=True)),
    "metal-cuda": ("cuda", cuda.load),
}
ON_REQUEST = frozenset({"metal-cuda"})  # not chosen unless they are asked for: nobody has measured them yet
KernelChoice = Literal["auto", "metal", "reference"]  # which kernels compute


class Backend(NamedTuple):
    """A row of BACKENDS with its device, and whether this machine can run the backend."""

    name: str
    device: Device
    load: Callable[[], Ops]
    missing: str | None  # why it cannot be loaded on this machine; None if it can be


def list_backends(device: str | None = None) -> Iterator[Backend]:
    """Yield all backends, or those for one device, the fastest first; the reference (plain torch) is not among them."""
    for name, (device_name, load) in BACKENDS.items():
        if device not in (None, device_name):
            continue
        missing = None
        try:
            load()
        except KernelsMissing as error:
            missing = str(error)
        yield Backend(name, get_device(device_name), load, missing)


class CheckedOps(NamedTuple):
    """The operations of a backend after its self-check; those that failed are replaced by the reference."""

    backend: str
    ops: Ops
    verdicts: list[Verdict]  # results of the self-check; empty for the reference, which is not checked

    @property
    def faulty_ops(self) -> list[str]:
        """The full names (`OpInfo.full_name`) of operations that failed their check; the reference computes them."""
        return [verdict.op for verdict in self.verdicts if verdict.fault is not None]

    @property
    def backend_by_op(self) -> dict[str, str]:
        """For each operation's name, the name of the backend that computes it."""
        faulty = {full_name.partition(".")[0] for full_name in self.faulty_ops}
        return {name: REFERENCE if name in faulty else self.backend for name in OP_NAMES}

    @property
    def description(self) -> str:
        """The backend described in words, for a log or a status page."""
        if self.backend == REFERENCE:
            return "plain torch"
        return self.backend + (f", plain torch for {', '.join(self.faulty_ops)}" if self.faulty_ops else "")


def load_ops(
    device: Device,
    dtype: torch.dtype,
    *,
    kernels: KernelChoice = "auto",
    names: frozenset[str] = frozenset(OP_NAMES),
) -> CheckedOps:
    """Return the fastest operations for `device`; those that fail their check in `dtype` are replaced, and logged.

    `kernels`: "metal": only the Metal kernels; "reference": plain torch. `names` are the operations that will be used:
    no others are checked. Raises KernelsMissing if there are no such kernels for the device or for `dtype` though they,
    or an emulated device, were asked for.
    """
    if device.is_emulated:
        metal.register_emulated_device()
    if kernels == REFERENCE:
        return CheckedOps(REFERENCE, ReferenceOps(), [])
    chosen = [name for name, (for_device, _) in BACKENDS.items() if for_device == device.name and _is_of(name, kernels)]
    if device.name != "cpu" and chosen:
        log.info("compiling (unless cached) and checking the kernels for %s ...", device.name)
    reason = f"they do not compute in {dtype}" if chosen else "there are none for this device"
    for backend in list_backends(device.name) if chosen and dtype in DTYPES else ():
        if backend.name not in chosen:
            continue
        if backend.missing is None:
            return _check_backend(backend, dtype, names)
        reason = backend.missing
        log.debug("the backend %s cannot be loaded: %s", backend.name, reason)
    if device.is_emulated or kernels == "metal":
        raise KernelsMissing(reason)
    log.warning("there are no kernels for %s on %s: plain torch is used, which is slower", dtype, device.name)
    return CheckedOps(REFERENCE, ReferenceOps(), [])


def _is_of(name: str, kernels: KernelChoice) -> bool:
    """Return whether a backend is among those that a choice of kernels may mean."""
    return name not in ON_REQUEST if kernels == "auto" else name.startswith(kernels)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread in the `with` block: on busy cores, two are twenty times slower with small inputs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache  # so that a backend is checked only once per process and dtype
def _check_backend(backend: Backend, dtype: torch.dtype, names: frozenset[str]) -> CheckedOps:
    ops = backend.load()
    with _one_thread():
        verdicts = check_ops(ops, dtype, backend.device.tensors, names)
    for verdict in verdicts:
        if verdict.fault is not None:
            log.error(
                "KERNEL FAILS ITS CHECK, plain torch is used: %s of %s: %s", verdict.op, backend.name, verdict.fault
            )
    return CheckedOps(backend.name, replace_faulty(ops, verdicts), verdicts)
