"""Checks of a tensor's type and size and of a step's addresses; each operation builds its own checks from these.

A failed check raises ValueError with a message that says what is required and what was found. Knows no operation and no
backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.store import KVStore
from kernels.types import Slots

ANY, AT_LEAST_ONE = -1, -2  # in `sizes`: a dimension of any size; a dimension of size 1 or more
FLOATS: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check(holds: bool, message: str, *values: object) -> None:
    """Raise ValueError unless `holds`. The values replace the {} of the message, which is formatted only on failure."""
    if not holds:
        raise ValueError(message.format(*(list(value) if isinstance(value, torch.Size) else value for value in values)))


def check_tensor(
    operation: str,
    name: str,
    tensor: Tensor,
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype] = FLOATS,
    device: torch.device | None = None,
) -> None:
    """Raise ValueError unless a tensor has these sizes, one of these dtypes and, if one is given, this device."""
    if (
        not _has_sizes(tensor.shape, sizes)
        or tensor.dtype not in dtypes
        or (device is not None and tensor.device != device)
    ):
        raise ValueError(_format_message(operation, name, tensor, sizes, dtypes, device))


def _has_sizes(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether a shape fits `sizes`; in a plain loop, which is fast, as this runs before every operation."""
    if len(shape) != len(sizes):
        return False
    for n, size in zip(shape, sizes, strict=True):  # noqa: SIM110
        if n != size and (size >= 0 or n < ANY - size):
            return False
    return True


def _format_message(
    operation: str,
    name: str,
    tensor: Tensor,
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None,
) -> str:
    """Return an error message: what the tensor's sizes, dtype and device must be, and what they are."""
    wanted = ", ".join({ANY: "any", AT_LEAST_ONE: "at least 1"}.get(size, str(size)) for size in sizes)
    types = " or ".join(_format_dtype(dtype) for dtype in dict.fromkeys(dtypes))
    on_device = "" if device is None else f" on {device}"
    found = f"{_format_dtype(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"
    return f"{operation}: {name} must be {types} [{wanted}]{on_device}, and is {found}"


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class SlotsChecker:
    """Checks the addresses of a step (`Slots`) only once, although the operations of every layer get them."""

    def __init__(self) -> None:
        self._tokens: WeakKeyDictionary[Slots, tuple[KVStore, int]] = WeakKeyDictionary()

    def check(self, operation: str, at: Slots, store: KVStore, tokens: int | None = None) -> None:
        """Raise ValueError unless the addresses fit each other and the store.

        If `tokens` is given, their rows must not have more tokens than that.
        """
        found = self._tokens.get(at)
        if found is None or found[0] is not store:
            found = self._tokens[at] = store, _check_slots(operation, at, store)
        if tokens is not None and found[1] > tokens:
            raise ValueError(f"{operation}: the rows have {found[1]} tokens, but only {tokens} are given")


def _check_slots(operation: str, at: Slots, store: KVStore) -> int:
    """Check a step's addresses; return the number of tokens in its rows.

    On a GPU it returns 0, as reading the number would wait for the GPU.
    """
    device, integers = store.device, (torch.int32,)
    check_tensor(operation, "start", at.start, (ANY,), integers, device)
    rows = at.num_rows
    check_tensor(operation, "table", at.table, (AT_LEAST_ONE, AT_LEAST_ONE), integers, device)
    check_tensor(operation, "row_seat", at.row_seat, (rows,), integers, device)
    check_tensor(operation, "q_start", at.q_start, (rows + 1,), integers, device)
    check(
        at.block_size == store.block_size and at.sinks >= 0 and at.ring >= 0 and 0 <= at.num_decode <= rows,
        "{}: blocks of {} slots, {} sinks, a ring of {} and {} rows of one token do not fit a store of {} and {} rows",
        *(operation, at.block_size, at.sinks, at.ring, at.num_decode, store.block_size, rows),
    )
    return int(at.q_start[-1]) if device.type == "cpu" else 0
