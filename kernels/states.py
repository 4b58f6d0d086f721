"""States of recurrent layers as typed, strided views of slots of memory.

A slot holds what all state layers of a model keep of one text; its number is that of its first page:

    slot   | layer 0: tensor 0 | tensor 1 | layer 1: tensor 0 | ... | unused |
           0                                                slot_bytes   whole pages

Knows neither the owner of a slot nor which text it is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.store import ALIGN, PagedMemory


class StateTensor(NamedTuple):
    """One tensor that a layer keeps of a text, whatever its length."""

    shape: Sequence[int]
    dtype: torch.dtype

    @property
    def aligned_bytes(self) -> int:
        return -(-prod(self.shape) * self.dtype.itemsize // ALIGN) * ALIGN


StateSpec = Sequence[StateTensor]  # of one layer, such as a convolution's last inputs and a recurrent state


def compute_slot_bytes(layers: Sequence[StateSpec]) -> int:
    """Return the bytes of a slot for these state layers."""
    return sum(tensor.aligned_bytes for spec in layers for tensor in spec)


class StateStore:
    """The slots of one strategy instance: views of each state layer's tensors, made once."""

    def __init__(self, memory: PagedMemory, layers: Sequence[StateSpec]) -> None:
        """View a memory as slots of these state layers."""
        page = memory.page_bytes
        assert page % ALIGN == 0
        self.memory = memory.memory
        self.slot_bytes = compute_slot_bytes(layers)
        self.num_slots = max(0, memory.pages - -(-self.slot_bytes // page) + 1)
        self.slots = self.memory.as_strided((self.num_slots, self.slot_bytes), (page, 1))  # uint8
        self._views: list[list[Tensor]] = []
        offset = 0
        for spec in layers:
            self._views.append([])
            for tensor in spec:
                self._views[-1].append(self._view(tensor, offset, page))
                offset += tensor.aligned_bytes

    def _view(self, tensor: StateTensor, offset: int, page: int) -> Tensor:
        size = tensor.dtype.itemsize
        inner = torch.empty(tuple(tensor.shape), device="meta").stride()
        typed = self.memory.view(tensor.dtype)
        return typed.as_strided((self.num_slots, *tensor.shape), (page // size, *inner), offset // size)

    def tensors(self, layer: int) -> Sequence[Tensor]:
        """Return the tensors of a state layer, each [slots, ...]."""
        return self._views[layer]


NO_SLOT = -1  # in place of the slot of the states before a text, which are all zeros


class States(NamedTuple):
    """The states of a slice's rows: where each row's text has them, and where they go. Tensors are int32.

    `write` differs from each `read`, so that a step that failed can be repeated.
    """

    store: StateStore
    q_start: Tensor  # [B + 1] index of each row's first token in the slice
    read: Tensor  # [B] the slot of the states before the row, or NO_SLOT
    write: Tensor  # [B] the slot for the states after the row
    keep: Tensor  # [n, 3] (row, number of its tokens, slot): the states after these tokens are stored there as well
