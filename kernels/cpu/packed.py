"""Weights packed in the layout that the C++ matrix products read (see packed.h). Does not know the products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.memory import WeightArena, concatenate
from kernels.ops import PackedWeight
from kernels.weights.block_formats import BlockTensor
from kernels.weights.quantization import QuantizedTensor

PANEL, PANELS = 16, 4  # outputs in a panel and panels in a block, as in packed.h
BLOCK = PANEL * PANELS


class PackedMatrix(PackedWeight):
    """A packed weight, held as the arguments that the C++ operations take."""

    # the numbers; for integers also scale and, if there is one, offset, each in one level or two
    tensors: Sequence[Tensor]
    # rows (out), columns (in), bits of a number (0: floats), columns of a group, number of a codebook, levels of
    # scales, number of tensors
    layout: Sequence[int]

    def __init__(self, tensors: Sequence[Tensor], layout: Sequence[int], library: Any) -> None:
        self.tensors, self.layout = tensors, [*layout, len(tensors)]
        self.shape = torch.Size(layout[:2])
        self.device = tensors[0].device
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self._library = library

    def rows(self, which: Tensor) -> Tensor:
        found: Tensor = self._library.packed_rows(self.tensors, self.layout, which)
        return found


class PackedFloatMatrix(PackedMatrix):
    """A packed weight [out, in] of floats."""

    def __init__(self, weights: Sequence[Tensor], library: Any, memory: WeightArena) -> None:
        """Pack a weight, given in parts [n, in]; those that fill whole blocks are packed without joining them."""
        first = weights[0]
        if any(part.dim() != 2 or not part.numel() for part in weights):
            raise ValueError(f"linear: a weight must be [out, in], and is {[*first.shape]}")
        shape = sum(map(len, weights)), first.shape[1]
        numbers = memory.take(library.packed_numbers(*shape, first.dtype) * first.itemsize).view(first.dtype)
        if any(len(part) % BLOCK for part in weights[:-1]):
            weights = [concatenate(weights)]
        sizes = [library.packed_numbers(*part.shape, first.dtype) for part in weights]
        for out, part in zip(numbers.split(sizes), weights, strict=True):
            library.pack(out, part)
        super().__init__([numbers], [*shape, 0, 0, 0, 1], library)
        self.format = str(first.dtype).removeprefix("torch.")


class PackedIntMatrix(PackedMatrix):
    """A packed weight [out, in] of integers of 8 or 4 bits: value = scale * number + offset."""

    def __init__(self, weight: QuantizedTensor, library: Any, memory: WeightArena) -> None:
        numbers = memory.take(library.packed_numbers(*weight.shape, torch.uint8) * weight.bits // 8)
        library.pack_integers(numbers, weight.numbers, weight.bits)
        scales = [_arrange_by_panel(each) for each in (weight.scale, weight.offset)]
        super().__init__([numbers, *scales], [*weight.shape, weight.bits, weight.group, 0, 1], library)
        self.format = f"int{weight.bits}"


class PackedBlockMatrix(PackedMatrix):
    """A packed weight [out, in] in a block format: its numbers in their bits, and its scales by panels."""

    def __init__(self, weights: Sequence[BlockTensor], library: Any, memory: WeightArena) -> None:
        """Pack a weight, given in parts [n, in] of one format; those that fill whole blocks of rows are not joined."""
        format, width = weights[0].format, weights[0].shape[1]
        out = sum(part.shape[0] for part in weights)
        levels = 2 if format.columns > format.group else 1
        numbers = memory.take(library.packed_numbers(out, width, torch.uint8) * format.bits // 8)
        panels = -(-out // BLOCK) * PANELS

        def by_panel(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(panels, width // columns, PANEL, dtype=dtype)

        # The scales of MXFP4 are powers of 2, which float16 ends before.
        scales = torch.bfloat16 if format.name == "MXFP4" else torch.float16
        tensors = [numbers.view(panels, -1), by_panel(format.columns, scales)]
        if levels == 2:
            tensors.append(by_panel(format.group, torch.int8))
        if format.offsets:
            tensors.append(by_panel(format.columns, scales))
            tensors += [by_panel(format.group, torch.int8)] * (levels - 1)
        layout = [width, format.bits, format.group, format.codebook, levels, len(tensors)]
        if any(part.shape[0] % BLOCK for part in weights[:-1]):
            weights = [BlockTensor(concatenate([part.blocks for part in weights]), format)]
        first = 0
        for part in weights:
            rows = part.shape[0]
            some = slice(first // PANEL, -(-(first + rows) // BLOCK) * PANELS)
            own_numbers, *own_scales = (tensor[some] for tensor in tensors)
            library.pack_blocks([own_numbers.flatten(), *own_scales], [rows, *layout], part.blocks, format.name)
            first += rows
        super().__init__([numbers, *tensors[1:]], [out, *layout[:-1]], library)
        self.format = format.name


class JoinedMatrix(PackedMatrix):
    """Several packed weights of integers, each in its own format; all but the last have whole blocks of rows."""

    def __init__(self, parts: Sequence[PackedMatrix]) -> None:
        self._parts = parts
        self.tensors = [tensor for part in parts for tensor in part.tensors]
        self.layout = [number for part in parts for number in part.layout]
        self.shape = torch.Size((sum(part.shape[0] for part in parts), parts[0].shape[1]))
        self.device = parts[0].device
        self.nbytes = sum(part.nbytes for part in parts)
        self.format = max(parts, key=lambda part: part.shape[0]).format  # that of most rows

    @property
    def parts(self) -> Sequence[PackedWeight]:
        return self._parts

    def rows(self, which: Tensor) -> Tensor:
        found, first = torch.empty(len(which), self.shape[1]), 0
        for part in self._parts:
            chosen = (first <= which) & (which < first + part.shape[0])
            found[chosen] = part.rows(which[chosen] - first)
            first += part.shape[0]
        return found


def _arrange_by_panel(of_groups: Tensor) -> Tensor:
    """Arrange scales or offsets [out, groups] by panels -> [panels, groups, PANEL], padded with zeros."""
    outputs, groups = of_groups.shape
    panels = -(-outputs // BLOCK) * PANELS
    padded = of_groups.new_zeros(panels * PANEL, groups)
    padded[:outputs] = of_groups
    return padded.view(panels, PANEL, groups).transpose(1, 2).contiguous()
