"""Drops the tokens between sinks and window at a boundary, and rotates the keys of the window to their new positions.

RoPE rotates a key by an angle that is proportional to its position, so a rotation by the difference of two positions
takes a key from one to the other. A layer's rotated keys are computed before anything is written, then its keys and
values are moved, then the rotated keys replace the moved ones. So a compaction that is repeated after a failure rotates
no key twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cache_strategies.compressed.addresses import AddressGroup
from cache_strategies.compressed.compaction import Compactor
from cache_strategies.compressed.state import CompressedState, Move, Selection, States
from kernels.arguments import by_head
from kernels.kv_formats import Plane
from kernels.store import KVStore


@dataclass
class ShiftedMove(Move):
    """A compaction after which the tokens of the window have lower positions."""

    shift: int = 0  # by how much they are lower
    rotated: Plane | None = None  # rotated keys [N, H, D] of a layer whose keys are moved, and not replaced yet


@dataclass
class StreamingCompactor(Compactor):
    """Compacts the sequences of one streaming cache."""

    max_kept: int  # tokens: sinks and window

    def _choose(self, sequence: CompressedState) -> ShiftedMove:
        move = super()._choose(sequence)
        shift = sequence.length - sequence.shift - min(sequence.length, self.max_kept)
        return ShiftedMove(move.selections, move.states, shift=shift)

    def _select(self, sequence: CompressedState, number: int, group: AddressGroup, states: States) -> Selection | None:
        """Return the sinks and the latest tokens of a group; None if all stay.

        Layers with a window of their own keep the latest tokens only. Tokens are chosen by position and not by scores:
        in a very long text neighbouring positions are the same number in float32.
        """
        kept = sequence.groups[number]
        budget = self.budgets.count_kept(group.layers[0], sequence.length)
        if not kept.exceeds(budget, sequence.num_new):
            return None
        positions = kept.list_positions(sequence.boundary, sequence.length)
        total = positions[0].shape[2]
        sinks = self.options.sinks if group.window is None else 0
        stay = torch.cat((torch.arange(sinks), torch.arange(total - budget + sinks, total)))
        indices = stay.to(positions[0].device).expand(*positions[0].shape[:2], -1)
        return self._make_selection(kept, positions, [indices])

    def _move_layer(self, move: Move, layer: int, store: KVStore, src: Tensor, dst: Tensor) -> None:
        assert isinstance(move, ShiftedMove)
        if not move.shift:
            return super()._move_layer(move, layer, store, src, dst)
        group = self.memory.groups[self.memory.group_by_layer[layer]]
        sinks = self.options.sinks if group.window is None else 0  # they stay where they are
        if move.rotated is None:
            rotated = self._rotate(store, layer, src[sinks:], -move.shift)
            super()._move_layer(move, layer, store, src, dst)
            move.rotated = rotated
        plane = store.planes(layer)[0]
        plane.write(_locate(store, plane, dst[sinks:]), move.rotated)
        move.rotated = None
        return None

    def _rotate(self, store: KVStore, layer: int, slots: Tensor, delta: int) -> Plane:
        """Return the keys at slots [N, H], rotated by `delta` further positions and rounded once.

        The slots follow each other in the sequence's blocks, so whole blocks are read, which is faster.
        """
        rotate = self.setup.geometry.layers[layer].rotate
        assert rotate is not None, "the layers were checked at the start"
        plane = store.planes(layer)[0]
        blocks = (slots[:, 0] // store.block_size).unique_consecutive()
        first = int(slots[0, 0]) % store.block_size
        keys = plane.decode_blocks(blocks)
        # all are rotated alike, as if they were the heads of one token
        rotated = rotate(keys.flatten(0, 2)[None], torch.tensor([delta], device=keys.device))[0].view_as(keys)
        return plane.encode(rotated.flatten(0, 1)[first : first + len(slots)])  # [N, H, D]


def _locate(store: KVStore, plane: Plane, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of slots [N] or [N, H] in the tensors of a plane."""
    heads = torch.arange(plane.numbers.shape[1], device=slots.device)
    return by_head(slots) // store.block_size, heads, by_head(slots) % store.block_size
