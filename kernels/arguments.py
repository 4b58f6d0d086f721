"""Checks of a tensor's type and size, and of a step's addresses: what the operations' own checks are made of.

Raises ValueError with a message that says what is wanted and what was found. Knows no operation and no backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.store import KVStore
from kernels.types import Slots

ANY, SOME = -1, -2  # a size of 0 or more; a size of 1 or more
FLOATS: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def expect(holds: bool, words: str, *values: object) -> None:
    """Raise ValueError unless `holds`; `values` replace the {} of the message, formatted only when it is needed."""
    if not holds:
        raise ValueError(words.format(*(list(value) if isinstance(value, torch.Size) else value for value in values)))


def expect_tensor(
    operation: str,
    name: str,
    tensor: Tensor,
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype] = FLOATS,
    device: torch.device | None = None,
) -> None:
    """Raise ValueError unless a tensor has these sizes, one of these dtypes and, if given, is on this device."""
    if not _fits(tensor.shape, sizes) or tensor.dtype not in dtypes or (device is not None and tensor.device != device):
        raise ValueError(_words(operation, name, tensor, sizes, dtypes, device))


def _fits(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether a shape has these sizes; a plain loop, as this runs before every operation."""
    if len(shape) != len(sizes):
        return False
    for n, size in zip(shape, sizes, strict=True):  # noqa: SIM110
        if n != size and (size >= 0 or n < ANY - size):
            return False
    return True


def _words(
    operation: str,
    name: str,
    tensor: Tensor,
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None,
) -> str:
    """Return a message that says what the tensor must be and what it is."""
    wanted = ", ".join({ANY: "any", SOME: "at least 1"}.get(size, str(size)) for size in sizes)
    types = " or ".join(_name(dtype) for dtype in dict.fromkeys(dtypes))
    where = "" if device is None else f" on {device}"
    found = f"{_name(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"
    return f"{operation}: {name} must be {types} [{wanted}]{where}, and is {found}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Addresses:
    """Checks the addresses of a step once: all layers share them."""

    def __init__(self) -> None:
        self._tokens: WeakKeyDictionary[Slots, tuple[KVStore, int]] = WeakKeyDictionary()

    def expect(self, operation: str, at: Slots, store: KVStore, tokens: int | None = None) -> None:
        """Raise ValueError unless addresses fit each other, the store and, if given, the tokens that entered."""
        found = self._tokens.get(at)
        if found is None or found[0] is not store:
            found = self._tokens[at] = store, _tokens(operation, at, store)
        if tokens is not None and found[1] > tokens:
            raise ValueError(f"{operation}: rows of {found[1]} tokens, of which {tokens} entered")


def _tokens(operation: str, at: Slots, store: KVStore) -> int:
    """Check a step's addresses; return the number of tokens in its rows, or 0 on a device, so as not to wait for it."""
    device, whole = store.device, (torch.int32,)
    expect_tensor(operation, "start", at.start, (ANY,), whole, device)
    rows = at.num_rows
    expect_tensor(operation, "table", at.table, (SOME, SOME), whole, device)
    expect_tensor(operation, "row_seat", at.row_seat, (rows,), whole, device)
    expect_tensor(operation, "q_start", at.q_start, (rows + 1,), whole, device)
    expect(
        at.block_size == store.block_size and at.sinks >= 0 and at.ring >= 0 and 0 <= at.num_decode <= rows,
        "{}: blocks of {} slots, {} sinks, a ring of {} and {} rows of one token do not fit a store of {} and {} rows",
        *(operation, at.block_size, at.sinks, at.ring, at.num_decode, store.block_size, rows),
    )
    return int(at.q_start[-1]) if device.type == "cpu" else 0
