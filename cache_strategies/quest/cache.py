"""quest: a paged KV cache that keeps all keys, of which a decoded token reads the blocks that may matter most to it.

After Tang et al. 2024 (arXiv:2406.10774). Everything about blocks, their sharing and their eviction is `PagedCache`'s.
Two things differ. In layers without a window of their own each KV head has an allocation in every block, behind whose
keys and values lies their summary (summaries.py). And a decode row (one token) of a long text chooses blocks by their
summaries, in every layer and KV head anew (selection.py), and attends to these; all other rows attend to all keys.

A summary is computed when a block is full and a row is about to choose. A block that is written again has lost it.

Blocks found by prefix have exact keys. What a chosen few keys have gone into differs a little from what the model
computes, and with it the keys of the next layers. So the blocks that a sequence fills from its first choice on get no
hash, and are not found by others. While another sequence waits for what a row computes, the row reads all keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_strategies.base import CacheSetup, Locations, Rows
from cache_strategies.block_hashes import BlockHash
from cache_strategies.block_table import resolve_kv_formats
from cache_strategies.memory import Region
from cache_strategies.paged.cache import PagedCache, PagedSequence
from cache_strategies.paged.layer_groups import LayerGroup, LayerLayout, group_by_window
from cache_strategies.paged.state import PagedState
from cache_strategies.quest.addresses import Chosen, HeadAddresses, HeadGroup
from cache_strategies.quest.options import QuestOptions, selects_in
from cache_strategies.quest.selection import TextSizes
from cache_strategies.quest.summaries import BlockSummaries, compute_summary_bytes
from cache_strategies.types import Geometry
from kernels.kv_formats import KVFormats
from kernels.ops import KVLocation
from kernels.store import KVStore, compute_block_bytes


class QuestSequence(PagedSequence):
    """A paged sequence that knows whether its latest row has chosen blocks."""

    chooses = False

    def commit(self, ids: Sequence[int]) -> None:
        if self.chooses and ids:
            assert isinstance(self.cache, QuestCache)
            self.cache.withhold(self)
        super().commit(ids)


class QuestCache(PagedCache):
    """A paged cache whose decode rows choose the blocks that they read."""

    options: QuestOptions
    options_type = QuestOptions
    sequence_type = QuestSequence

    def __init__(self, setup: CacheSetup, options: QuestOptions) -> None:
        super().__init__(setup, options)
        self._summaries: BlockSummaries | None = None
        self._groups = list(self._make_groups())
        num_blocks = self.block_layout(options, setup.geometry)[1]
        num_read = options.count_read(num_blocks, self.block_size)
        room = num_read if num_read < num_blocks else 0
        every = [HeadAddresses(group, self.table, room) for group in self._groups]
        by_layer = {layer: each for each in every for layer in each.group.layers}
        layers = setup.geometry.layers
        self._addresses = [by_layer.get(layer) for layer in range(len(layers))]
        self._num_choosing = sum(map(selects_in, layers))  # layers in which rows choose
        self._chosen = Chosen((), ())  # in the latest step
        # By block: whether its summaries are those of its keys
        self._has_summary: NDArray[np.bool_] = np.zeros(self.store.num_blocks, np.bool_)
        if self._num_choosing and num_read < num_blocks:
            # The keys of a generated token are others if it is computed again as a part of a prompt, exactly
            self.contract = self.contract._replace(exact=False, replayable=False, chunk_invariant=False)

    # ---------------------------------------------------------------- layout
    @classmethod
    def _divide(cls, options: Any, geometry: Geometry) -> LayerLayout:
        block_size, _ = cls.block_layout(options, geometry)
        return group_by_window(geometry.layers, block_size, geometry.max_seq_len, by_head=True)

    @classmethod
    def count_group_bytes(cls, group: LayerGroup, options: Any, geometry: Geometry) -> int:
        if group.window is not None:
            return super().count_group_bytes(group, options, geometry)
        layers, formats = [geometry.layers[i] for i in group.layers], resolve_kv_formats(options, geometry)
        heads = [spec._replace(num_kv_heads=1) for spec in layers]
        keys = compute_block_bytes(heads, cls.block_layout(options, geometry)[0], formats)
        return keys + sum(compute_summary_bytes(spec, formats.k) for spec in layers)

    def make_group_store(self, group: LayerGroup, block_size: int, formats: KVFormats) -> tuple[Region, KVStore]:
        if group.window is not None:
            return super().make_group_store(group, block_size, formats)
        size = self.count_group_bytes(group, self.options, self.setup.geometry)
        region = self.setup.memory.region(size, "keys, values and summaries of a head")
        layers = {i: self.setup.geometry.layers[i] for i in group.layers}
        extra = sum(compute_summary_bytes(spec, formats.k) for spec in layers.values())
        return region, KVStore(region, layers, block_size, formats, split_heads=True, extra_bytes=extra)

    def _make_groups(self) -> Iterator[HeadGroup]:
        """Yield the layers in the store of split heads, by number of heads."""
        store = self._stores_by_group[0]
        if store is None:
            return
        layers = {i: self.setup.geometry.layers[i] for i in store.layers}
        self._summaries = summaries = BlockSummaries(store, layers)
        for num_heads in sorted({spec.num_kv_heads for spec in layers.values()}):
            numbers = [i for i, spec in layers.items() if spec.num_kv_heads == num_heads]
            yield HeadGroup(numbers, num_heads, store, summaries)

    # ---------------------------------------------------------------- steps
    def locate(self, rows: Rows[PagedState]) -> Locations:
        self.copies.run(self.setup.ops)
        self._chosen = chosen = self._find_choosing(rows)
        if chosen.rows:
            self._summarize([rows.sequences[number] for number in chosen.rows])
        slots = self.table.make_slots_by_store(rows)
        every = [each for each in dict.fromkeys(self._addresses) if each is not None]
        for each in every:
            each.update(rows, slots[0], chosen)
        whole = [KVLocation(store, at, None) for store, at in zip(self.stores, slots, strict=True)]
        by_head = {id(each): KVLocation(each.group.store, each.all, None) for each in every}  # one for each group
        self._located = [
            whole[number] if each is None else by_head[id(each)]
            for number, each in zip(self.store_by_layer, self._addresses, strict=True)
        ]
        if not chosen.rows:
            return Locations(self._located)
        layers = zip(self._located, self._addresses, self.setup.geometry.layers, strict=True)
        return Locations([None if each and selects_in(spec) else at for at, each, spec in layers])

    def _find_choosing(self, rows: Rows[PagedState]) -> Chosen:
        """Return the rows that choose blocks. What is written by any row loses its summary."""
        numbers: list[int] = []
        sizes: list[TextSizes] = []
        for number, (each, num_tokens) in enumerate(zip(rows.sequences, rows.counts, strict=True)):
            assert isinstance(each, QuestSequence)
            each.chooses = False
            if not self._num_choosing:
                continue
            first, end = each.length // self.block_size, self.count_blocks(each.length + num_tokens)
            self._has_summary[self.table.host_tables[0, each.index, first:end]] = False
            if num_tokens == 1:
                size = TextSizes(end, self.options.count_read(end, self.block_size))
                if size.num_read < size.num_blocks and not (self.pending and self._depends_on_others(each)):
                    each.chooses = True
                    numbers.append(number)
                    sizes.append(size)
        return Chosen(numbers, sizes)

    def _depends_on_others(self, sequence: PagedState) -> bool:
        """Return whether others compute blocks of a sequence in this step, or wait for what it computes."""
        first = sequence.length // self.block_size
        return any(block in self.pending for block in sequence.blocks[:first]) or any(
            self.pending.is_awaited(block) for block in sequence.blocks[first:]
        )

    def _summarize(self, sequences: Sequence[PagedState]) -> None:
        """Compute the missing summaries of the full blocks of sequences."""
        tables, full = self.table.host_tables, [sequence.length // self.block_size for sequence in sequences]
        blocks = [tables[0, sequence.index, :n] for sequence, n in zip(sequences, full, strict=True)]
        missing = [np.flatnonzero(~self._has_summary[each]) for each in blocks]
        if not any(map(len, missing)):
            return
        heads = slice(self.columns[0])
        found = [tables[heads, sequence.index, at].flatten() for sequence, at in zip(sequences, missing, strict=True)]
        numbers = torch.from_numpy(np.unique(np.concatenate(found)).astype(np.int64))
        assert self._summaries is not None
        self._summaries.fill(numbers.to(self.table.all_rows.device))
        for each, at in zip(blocks, missing, strict=True):
            self._has_summary[each[at]] = True

    def attend(self, layer: int, rows: Rows[PagedState], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Let rows that choose read the blocks that they select, and all others all their keys."""
        ops, spec = self.setup.ops, self.setup.geometry.layers[layer]
        addresses = self._addresses[layer]
        assert addresses is not None
        group, step = addresses.group, addresses.step
        ops.write_kv(group.store, layer, k, v, addresses.all)
        if step.others is not None:
            ops.attend(out, q, group.store, layer, step.others, spec)
        candidates, summaries = step.candidates, group.summaries.get(layer)
        ops.select_blocks(addresses.get_selected(layer), q[step.which], summaries, candidates.blocks, candidates.counts)
        ops.attend(out, q, group.store, layer, addresses.address(layer), spec)

    def gather(self, layer: int, rows: Rows[PagedState], row: int) -> tuple[Tensor, Tensor, Tensor]:
        location, spec, end = self._located[layer], self.setup.geometry.layers[layer], rows.end(row)
        assert location is not None
        if selects_in(spec) and row in self._chosen.rows:
            indices = positions = self._list_read(layer, row, end)
        else:
            indices = positions = self.list_visible_positions(end, spec)
            if location.store.split_heads:
                indices = positions[:, None].expand(-1, spec.num_kv_heads).contiguous()
        k, v = self.setup.ops.gather(location.store, layer, location.at, row, indices)
        return k, v, positions

    def _list_read(self, layer: int, row: int, end: int) -> Tensor:
        """Return the positions [S, H] of the keys before `end` that a row has read in a layer, which was computed."""
        addresses = self._addresses[layer]
        assert addresses is not None
        number = self._chosen.rows.index(row)
        blocks = addresses.list_read(layer, number, self._chosen.sizes[number])
        positions = blocks[..., None] * self.block_size + torch.arange(self.block_size, device=blocks.device)
        num_keys = positions[0].numel() - (-end % self.block_size)  # the last block is full up to `end`
        return positions.flatten(1)[:, :num_keys].T.contiguous()

    def withhold(self, sequence: PagedState) -> None:
        """Keep what a sequence computes from now on from being found by others, who wait for none of it."""
        sequence.salt = None
        for block in sequence.blocks[sequence.length // self.block_size :] if self.pending else ():
            if self.pending.owner(block) is sequence:
                heir = self.pending.remove_sequence(block, sequence)
                assert heir is None, "a row that others wait for reads all keys"
                self.promised.discard(block)
                self.pool.unpublish(block)

    def write_data(self, block_hash: BlockHash, data: Tensor) -> bool:
        is_written = super().write_data(block_hash, data)
        if is_written and (block := self.pool.find(block_hash)) is not None and block_hash.group == 0:
            self._has_summary[self.pool.columns(block)[0]] = False  # it may be of another version
        return is_written

    # ---------------------------------------------------------------- reports
    def count_visible(self, layer: int, length: int) -> int | None:
        if not selects_in(self.setup.geometry.layers[layer]):
            return None
        num_blocks = length // self.block_size + 1
        return length - (num_blocks - self.options.count_read(num_blocks, self.block_size)) * self.block_size
