"""The plan of a step under `quest`: addresses for most layers and rows, and a hook where rows choose what they read.

If no row chooses, as in prefill and in short texts, all layers have addresses, and kernels compute them as under
`paged`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup, Plan, Row
from cache_strategies.block_table import BlockTable
from cache_strategies.paged.seat import PagedSeat
from cache_strategies.quest.addresses import Chosen, HeadAddresses
from cache_strategies.quest.options import selects_in
from kernels.ops import KVLocation
from kernels.store import KVStore


class QuestPlan(Plan[PagedSeat]):
    """A plan in which the rows `chosen.rows` read some blocks only, in layers without a window of their own."""

    def __init__(
        self,
        setup: CacheSetup,
        rows: Sequence[Row[PagedSeat]],
        chosen: Chosen,
        table: BlockTable,
        stores: Sequence[KVStore],
        store_by_layer: Sequence[int],
        by_layer: Sequence[HeadAddresses | None],
    ) -> None:
        """Set the addresses of a step. `by_layer` has those by head; a layer without them is in a store with all heads.

        `stores` and `store_by_layer` are those of `BlockTableCache`.
        """
        self.rows = rows
        self.chosen = chosen
        self._setup = setup
        self._by_layer = by_layer
        slots = table.make_slots_by_store(rows)
        for addresses in dict.fromkeys(by_layer):
            if addresses is not None:
                addresses.update(rows, slots[0], chosen)
        whole = [KVLocation(store, at, None) for store, at in zip(stores, slots, strict=True)]
        by_head = {
            id(each): KVLocation(each.group.store, each.all, None) for each in by_layer if each is not None
        }  # one object for each group of layers
        self._all_keys = [
            whole[number] if each is None else by_head[id(each)]
            for number, each in zip(store_by_layer, by_layer, strict=True)
        ]
        self._locations = [
            None if chosen.rows and each is not None and selects_in(spec) else location
            for location, each, spec in zip(self._all_keys, by_layer, setup.geometry.layers, strict=True)
        ]

    def kv_location(self, layer_idx: int) -> KVLocation | None:
        return self._locations[layer_idx]

    def list_kv_locations(self, num_layers: int) -> Sequence[KVLocation | None]:
        return self._locations

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        ops, spec = self._setup.ops, self._setup.geometry.layers[layer_idx]
        addresses = self._by_layer[layer_idx]
        assert addresses is not None
        group, step = addresses.group, addresses.step
        ops.write_kv(group.store, layer_idx, k, v, addresses.all)
        if step.others is not None:
            ops.attend(out, q, group.store, layer_idx, step.others, spec)
        candidates, summaries = step.candidates, group.summaries.get(layer_idx)
        ops.select_blocks(
            addresses.get_selected(layer_idx), q[step.which], summaries, candidates.blocks, candidates.counts
        )
        ops.attend(out, q, group.store, layer_idx, addresses.address(layer_idx), spec)

    def gather_kv(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        (seat, num_tokens), location = self.rows[row], self._all_keys[layer_idx]
        end, spec = seat.length + num_tokens, self._setup.geometry.layers[layer_idx]
        first = 0 if spec.window is None else max(0, end - spec.window)
        if self._locations[layer_idx] is None and row in self.chosen.rows:
            indices = self._list_read(layer_idx, row, location.store.block_size, end)
            positions = indices
        else:
            positions = torch.arange(first, end, device=location.store.device)
            indices = positions
            if location.store.split_heads:
                indices = positions[:, None].expand(-1, spec.num_kv_heads).contiguous()
        k, v = self._setup.ops.gather(location.store, layer_idx, location.at, row, indices)
        return k, v, positions

    def _list_read(self, layer_idx: int, row: int, block_size: int, end: int) -> Tensor:
        """Return the positions [S, H] of the keys before `end` that a row has read in a layer, which was computed."""
        addresses = self._by_layer[layer_idx]
        assert addresses is not None
        number = self.chosen.rows.index(row)
        blocks = addresses.list_read(layer_idx, number, self.chosen.sizes[number])
        positions = blocks[..., None] * block_size + torch.arange(block_size, device=blocks.device)
        num_keys = positions[0].numel() - (-end % block_size)  # the last block is full up to `end`
        return positions.flatten(1)[:, :num_keys].T.contiguous()
