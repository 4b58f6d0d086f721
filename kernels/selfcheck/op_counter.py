"""Counts the operations of a step, and the bytes that they must move according to the table of operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kernels.selfcheck.op_db import OPS
from kernels.tracing import NULL_CONTEXT, Recorder

COUNT_BYTES = {op.name: op.count_bytes for op in OPS}


class OpCounter(Recorder):
    """Counts the calls of each operation, and their bytes, while it is attached."""

    needs_every_op = True

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def op(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[object]:
        self.calls[name] += 1
        self.bytes[name] += COUNT_BYTES[name](*args, **kwargs)
        return NULL_CONTEXT
