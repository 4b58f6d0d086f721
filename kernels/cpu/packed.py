"""Weights as the C++ products read them. What lies where is packed.h's to say; this finds rows in it again.

Knows no product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.memory import mapped
from kernels.ops import Packed
from kernels.quantised import Quantised

PANEL, PANELS = 16, 4  # outputs of a panel, panels of a block; packed.h
TILE_BYTES = 1024
QUAD = 4  # columns of whole numbers that lie together
ZERO = {8: 128, 4: 8}  # the number that stands for 0 where there are no offsets
SIDE_BY_SIDE = {torch.bfloat16: 2}  # columns of an output that lie together; elsewhere 1


class PackedMatrix(Packed):
    """What the C++ operations take."""

    parts: Sequence[Tensor]  # numbers, and of whole numbers scale and perhaps offset
    layout: Sequence[int]  # out, in, bits of a number (0: floats), columns of a group


class PackedFloats(PackedMatrix):
    """A weight [out, in] of floats."""

    quantised = False

    def __init__(self, weight: Tensor, library: Any) -> None:
        self.shape = weight.shape
        self.device = weight.device
        self.dtype = weight.dtype
        self.format = str(weight.dtype).removeprefix("torch.")
        size = library.packed_numbers(*weight.shape, weight.dtype)
        self.numbers = mapped(size * weight.dtype.itemsize).view(weight.dtype)
        library.pack(self.numbers, weight)
        self.nbytes = self.numbers.nbytes
        self.parts, self.layout = [self.numbers], [*weight.shape, 0, 0]

    def rows(self, which: Tensor) -> Tensor:
        together = SIDE_BY_SIDE.get(self.dtype, 1)
        tile = (TILE_BYTES // self.dtype.itemsize // PANEL // together, PANEL, together)
        tiles = self.numbers.view(-(-self.shape[0] // (PANEL * PANELS)), -1, PANELS, *tile)
        block, within = which // (PANEL * PANELS), which % (PANEL * PANELS)
        found = tiles[block, :, within // PANEL, :, within % PANEL]  # [n, tiles, columns / together, together]
        return found.flatten(1)[:, : self.shape[1]]


class PackedWhole(PackedMatrix):
    """A weight [out, in] of whole numbers of 8 or 4 bits, value = scale * number + offset."""

    quantised = True

    def __init__(self, weight: Quantised, library: Any) -> None:
        self.shape = weight.shape
        self.device = weight.device
        self.bits, self.group = weight.bits, weight.group
        self.format = f"int{weight.bits}"
        outputs, width = weight.shape
        self.numbers = mapped(library.packed_numbers(outputs, width, torch.uint8) * weight.bits // 8)
        self.scale = _by_panel(weight.scale)
        self.offset = None if _symmetric(weight) else _by_panel(weight.offset)
        library.pack_whole(self.numbers, weight.numbers, weight.bits, self.offset is not None)
        self.parts = [part for part in (self.numbers, self.scale, self.offset) if part is not None]
        self.layout = [*weight.shape, weight.bits, weight.group]
        self.nbytes = sum(part.nbytes for part in self.parts)

    def rows(self, which: Tensor) -> Tensor:
        halves = 8 // self.bits
        tile = (TILE_BYTES // PANEL // QUAD // halves, PANEL, QUAD)
        tiles = self.numbers.view(len(self.scale) // PANELS, -1, PANELS, *tile)
        panel, lane = which // PANEL, which % PANEL
        found = tiles[panel // PANELS, :, panel % PANELS, :, lane]  # [n, tiles, quads / halves, QUAD]
        if self.offset is None and self.bits == 8:
            found = found ^ ZERO[8]
        if halves == 2:
            found = torch.stack((found & 15, found >> 4), -2)
        numbers = found.flatten(1)[:, : self.shape[1]].unflatten(1, (-1, self.group)).float()
        scale = self.scale[panel, :, lane].float()[..., None]
        offset = -scale * ZERO[self.bits] if self.offset is None else self.offset[panel, :, lane].float()[..., None]
        values: Tensor = numbers * scale + offset
        return values.flatten(1)


def _symmetric(weight: Quantised) -> bool:
    """Whether value = scale * (number - ZERO), so that there is nothing to know about offsets."""
    return torch.equal(weight.offset.float(), weight.scale.float() * -ZERO[weight.bits])


def _by_panel(of_groups: Tensor) -> Tensor:
    """[out, groups] -> [panels, groups, PANEL], zeros behind the last."""
    outputs, groups = of_groups.shape
    panels = -(-outputs // (PANEL * PANELS)) * PANELS
    padded = of_groups.new_zeros(panels * PANEL, groups)
    padded[:outputs] = of_groups
    return padded.view(panels, PANEL, groups).transpose(1, 2).contiguous()
