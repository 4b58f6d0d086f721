"""What a row of the table of operations says (`OpInfo`), and how near to the reference a result must come.

Knows no operation: their rows stand in layer_ops.py and cache_ops.py, all of them together in op_db.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.ops import Ops

Tolerance = Mapping[torch.dtype, float]
Samples = Iterator[tuple[str, Tensor]]  # what was computed, and the result

# By dtype, of the largest number of a result; halves are rounded once or twice on the way.
ROUNDING: Tolerance = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SUMS: Tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ATTENTION: Tolerance = {**ROUNDING, torch.float32: 1e-5}
INT8_INPUTS: Tolerance = dict.fromkeys(ROUNDING, 2e-2)  # x becomes whole numbers of 8 bits
EXACT: Tolerance = dict.fromkeys(ROUNDING, 0.0)
DTYPES = tuple(ROUNDING)  # of activations, keys and values


class OpInfo(NamedTuple):
    """An operation with one kind of arguments: how it is checked and measured (after PyTorch's OpInfo)."""

    name: str  # a method of Ops
    tolerance: Tolerance
    samples: Callable[[Ops, torch.dtype, torch.device], Samples]  # of small arguments, for the self-check
    traffic: str  # what must be read and written, however it is computed
    count_bytes: Callable[..., int]  # the same as a number, of the arguments of a call
    row_arguments: tuple[str, ...]  # arguments whose rows, in the first dimension, do not affect each other
    variant: str = ""  # what distinguishes this row from others of the same operation

    @property
    def full_name(self) -> str:
        """Return the name of the row, unlike those of all others."""
        return f"{self.name}.{self.variant}" if self.variant else self.name


def random_tensors(device: torch.device) -> Callable[..., Tensor]:
    """Return a function that draws a tensor of a shape: the same values after every call of this."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device)
