"""Weights packed in the layout that the C++ matrix products read (see packed.h). Does not know the products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.memory import ConcatenatedWeight, WeightArena, concatenate
from kernels.ops import PackedWeight
from kernels.quantization import QuantizedTensor

PANEL, PANELS = 16, 4  # outputs in a panel and panels in a block, as in packed.h
ZERO_POINT = {8: 128, 4: 8}  # by bits: the number whose value is 0 in a weight without offsets


class PackedMatrix(PackedWeight):
    """A packed weight, held as the arguments that the C++ operations take."""

    parts: Sequence[Tensor]  # tensors: the numbers; for integers also scale and, if there is one, offset
    layout: Sequence[int]  # rows (out), columns (in), bits of a number (0: floats), columns of a group

    def __init__(self, parts: Sequence[Tensor], layout: Sequence[int], library: Any) -> None:
        self.parts, self.layout = parts, layout
        self.shape = torch.Size(layout[:2])
        self.device = parts[0].device
        self.nbytes = sum(part.nbytes for part in parts)
        self._library = library

    def rows(self, which: Tensor) -> Tensor:
        found: Tensor = self._library.packed_rows(self.parts, self.layout, which)
        return found


class PackedFloatMatrix(PackedMatrix):
    """A packed weight [out, in] of floats."""

    def __init__(self, weight: Tensor | ConcatenatedWeight, library: Any, pool: WeightArena) -> None:
        """Pack a weight; parts of a ConcatenatedWeight that fill whole blocks are packed without joining them."""
        if len(weight.shape) != 2 or not all(weight.shape):
            raise ValueError(f"linear: a weight must be [out, in], and is {[*weight.shape]}")
        size = library.packed_numbers(*weight.shape, weight.dtype)
        numbers = pool.take(size * weight.dtype.itemsize).view(weight.dtype)
        parts = weight.parts if isinstance(weight, ConcatenatedWeight) else [weight]
        if any(len(part) % (PANEL * PANELS) for part in parts[:-1]):
            parts = [concatenate(parts)]
        sizes = [library.packed_numbers(*part.shape, weight.dtype) for part in parts]
        for out, part in zip(numbers.split(sizes), parts, strict=True):
            library.pack(out, part)
        super().__init__([numbers], [*weight.shape, 0, 0], library)
        self.format = str(weight.dtype).removeprefix("torch.")


class PackedIntMatrix(PackedMatrix):
    """A packed weight [out, in] of integers of 8 or 4 bits: value = scale * number + offset."""

    def __init__(self, weight: QuantizedTensor, library: Any, pool: WeightArena) -> None:
        numbers = pool.take(library.packed_numbers(*weight.shape, torch.uint8) * weight.bits // 8)
        offsets = [] if _is_symmetric(weight) else [_arrange_by_panel(weight.offset)]
        library.pack_integers(numbers, weight.numbers, weight.bits, bool(offsets))
        layout = [*weight.shape, weight.bits, weight.group]
        super().__init__([numbers, _arrange_by_panel(weight.scale), *offsets], layout, library)
        self.format = f"int{weight.bits}"


def _is_symmetric(weight: QuantizedTensor) -> bool:
    """Return whether value = scale * (number - ZERO_POINT) in the whole weight, so that offsets need not be stored."""
    return torch.equal(weight.offset.float(), weight.scale.float() * -ZERO_POINT[weight.bits])


def _arrange_by_panel(of_groups: Tensor) -> Tensor:
    """Arrange scales or offsets [out, groups] by panels -> [panels, groups, PANEL], padded with zeros."""
    outputs, groups = of_groups.shape
    panels = -(-outputs // (PANEL * PANELS)) * PANELS
    padded = of_groups.new_zeros(panels * PANEL, groups)
    padded[:outputs] = of_groups
    return padded.view(panels, PANEL, groups).transpose(1, 2).contiguous()
