"""The type of a row of the table of operations (`OpInfo`), and how far results may be from the reference's.

Knows no operation: the rows are in layer_ops.py and cache_ops.py, and op_db.py joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.ops import Ops

Tolerance = Mapping[torch.dtype, float]
Samples = Iterator[tuple[str, Tensor]]  # yields (description of a result, result)

# Largest allowed errors by dtype, relative to the largest number of a result; 16-bit dtypes are rounded once or twice
# before the result.
ROUNDING: Tolerance = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SUMS: Tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ATTENTION: Tolerance = {**ROUNDING, torch.float32: 1e-5}
INT8_INPUTS: Tolerance = dict.fromkeys(ROUNDING, 2e-2)  # errors of products before which x is quantized to 8 bits
EXACT: Tolerance = dict.fromkeys(ROUNDING, 0.0)


class OpInfo(NamedTuple):
    """How an operation is checked and measured, for one kind of arguments (like PyTorch's OpInfo)."""

    name: str  # a method of Ops
    tolerance: Tolerance
    samples: Callable[
        [Ops, torch.dtype, torch.device], Samples
    ]  # computes results from small arguments, for the self-check
    traffic: str  # description of the tensors that any implementation must read and write
    count_bytes: Callable[..., int]  # returns the size of `traffic` in bytes, from the arguments of a call
    row_arguments: tuple[str, ...]  # names of arguments whose rows (first dimension) do not affect each other
    variant: str = ""  # distinguishes this row of the table from others of the same operation

    @property
    def full_name(self) -> str:
        """The name of the operation and of the variant, which is unique in the table."""
        return f"{self.name}.{self.variant}" if self.variant else self.name


def random_tensors(device: torch.device) -> Callable[..., Tensor]:
    """Return a function that returns random tensors of given shapes; successive calls give the same in each run."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device)
