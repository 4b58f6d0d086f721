"""Checks where a plug-in has located keys before kernels read them, and describes strange values for messages.

The functions raise TypeError or ValueError, and whatever a strategy's object raises while it is read: call them under a
guard of the instance (engine/guard.py).
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from cache_strategies.memory import Memory
from cache_strategies.types import Geometry
from kernels.ops import KVLocation, QueryTap

MAX_REPORT_BYTES = 1 << 26  # of a report in JSON
MAX_DESCRIPTION = 500  # maximum number of characters of a value or an error in a message


def describe(value: object) -> str:
    """Return a value's repr for a message, shortened if it is long; its type if it has no repr."""
    return _shorten(repr, value)


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an exception, shortened if it is long."""
    return f"{type(error).__name__}: {_shorten(str, error)}"


def _shorten(write: Any, value: object) -> str:
    try:
        text = write(value)
    except Exception:  # of the strategy's class
        text = f"<{type(value).__name__} that cannot be printed>"
    return text if len(text) <= MAX_DESCRIPTION else f"{text[:MAX_DESCRIPTION]}..."


def check_locations(locations: Sequence[object]) -> None:
    """Raise unless each location is None, or has the type and the window that kernels expect."""
    for location in locations:
        if location is None:
            continue
        if not isinstance(location, KVLocation):
            raise TypeError(f"locate() returned {describe(location)}, not a KVLocation or None")
        if location.window is not None and (type(location.window) is not int or location.window < 1):
            raise ValueError(f"locate() has the window {describe(location.window)}")


def check_owner(locations: Sequence[KVLocation | None], memory: Memory, name: str) -> None:
    """Raise ValueError if keys would be read from or written to a region of another instance than `name`."""
    for store in {id(each.store): each.store for each in locations if each is not None}.values():
        if memory.find_owner(store.memory) not in (None, name):
            raise ValueError("a store is in a region of another strategy")


def check_tap(tap: object, num_tokens: int, geometry: Geometry) -> None:
    """Raise unless a query tap names tokens of the located rows, and has room for their queries.

    The numbers of the tokens are checked on a CPU only, as reading them elsewhere waits for the device.
    """
    if not isinstance(tap, QueryTap):
        raise TypeError(f"locate() has {describe(tap)} for a tap, not a QueryTap")
    tokens, queries = tap
    if tokens.dtype is not torch.int64 or tokens.dim() != 1 or len(queries) != len(geometry.layers):
        raise ValueError("the tap: expected a vector of int64, and a tensor or None for each layer")
    if tokens.is_cpu and tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < num_tokens:
        raise ValueError(f"the tap: tokens must be from 0 to {num_tokens - 1}")
    for each, spec in zip(queries, geometry.layers, strict=True):
        shape = (len(tokens), spec.num_q_heads, spec.head_dim)
        if each is not None and (tuple(each.shape) != shape or not each.is_contiguous()):
            raise ValueError(f"the tap: expected dense queries of shape {shape}")


def check_int(what: str, found: Any, most: int = 2**62) -> int:
    """Return an int from 0 to `most`. Raises TypeError or ValueError for anything else."""
    if type(found) is not int:
        raise TypeError(f"{what} is {describe(found)}, not an int")
    if not 0 <= found <= most:
        raise ValueError(f"{what} is {found}, which must be from 0 to {most}")
    return found


def to_plain(found: Any, kind: Any) -> Any:
    """Return what a method reported as values of a type. Raises ValueError or TypeError if JSON cannot hold them."""
    builtins = msgspec.to_builtins(found, enc_hook=operator.index)  # of numpy's integers
    size = len(json.dumps(builtins, allow_nan=False, ensure_ascii=False).encode())  # refuses halves of surrogate pairs
    if size > MAX_REPORT_BYTES:
        raise ValueError(f"it returned {size} bytes of JSON, more than {MAX_REPORT_BYTES}")
    return msgspec.convert(builtins, kind)
