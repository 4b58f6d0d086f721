"""Compacts a sequence at a boundary of its text: scores its keys, then moves those that stay into fresh blocks.

The first phase only reads, so a scorer that fails changes nothing. The second copies what stays, and switches the
sequence to the fresh blocks only once all is copied: a failure there changes nothing that is in use either.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup
from cache_strategies.compressed.addresses import AddressGroup
from cache_strategies.compressed.memory import CompressedMemory
from cache_strategies.compressed.options import Budgets, CompressedOptions
from cache_strategies.compressed.queries import QueryBuffer
from cache_strategies.compressed.seat import CompressedSeat, KeptTokens, State
from cache_strategies.compressed.selection import protect, select_top, share_budget
from cache_strategies.scorers.base import Past, Scorer


class Selection(NamedTuple):
    """The keys of a group that stay: their indices among those held, and their positions."""

    indices: Sequence[Tensor]  # by column: [layers, heads of the column, kept]
    positions: Tensor  # [layers, heads, most kept], padded with -1


class Compactor:
    """Compacts the seats of one cache."""

    def __init__(
        self,
        setup: CacheSetup,
        options: CompressedOptions,
        memory: CompressedMemory,
        budgets: Budgets,
        scorer: Scorer,
        queries: QueryBuffer | None,
    ) -> None:
        self._setup = setup
        self._options = options
        self._memory = memory
        self._budgets = budgets
        self._scorer = scorer
        self._queries = queries

    @torch.inference_mode()
    def compact(self, seat: CompressedSeat) -> None:
        """Drop the keys of a seat at a boundary that exceed the budgets."""
        states = dict(seat.states)
        selections = [self._select(seat, number, group, states) for number, group in enumerate(self._memory.groups)]
        for number, selection in enumerate(selections):
            if selection is not None:
                self._copy(seat, number, selection)
        for number, selection in enumerate(selections):
            self._switch(seat, number, selection)
        seat.states, seat.boundary = states, seat.length

    # ---------------------------------------------------------------- which keys stay
    def _select(
        self, seat: CompressedSeat, number: int, group: AddressGroup, states: dict[tuple[int, int], tuple[State, State]]
    ) -> Selection | None:
        """Return which keys of a group stay; None if all do. What the scorer remembers is replaced in `states`."""
        kept = seat.groups[number]
        budget = self._budgets.count_kept(group.layers[0], seat.length)
        is_full = sum(kept.counts) + seat.num_new * len(kept.counts) > budget * len(kept.counts)
        if group.window is not None:
            return self._select_latest(seat, kept, budget) if is_full else None
        if not is_full and self._scorer.num_queries is not None:
            return None
        pasts = self._make_pasts(seat, number, group, states)
        options = self._options
        scores = []
        for column in pasts:  # one, or one for each head
            of_layers = torch.stack([self._score(past) for past in column])  # [layers, heads, S]
            positions = torch.stack([past.positions for past in column])
            scores.append(protect(of_layers, positions, seat.length, options.sinks, options.recent))
        counts = self._count_by_column(scores, budget) if is_full else [each.shape[-1] for each in scores]
        indices = [select_top(each, count) for each, count in zip(scores, counts, strict=True)]
        self._remember(pasts, indices, states)
        if not is_full:
            return None
        stay = [
            torch.stack([past.positions for past in column]).gather(2, index)
            for column, index in zip(pasts, indices, strict=True)
        ]
        return Selection(indices, _pad(stay))

    def _select_latest(self, seat: CompressedSeat, kept: KeptTokens, count: int) -> Selection:
        """Keep the latest tokens, for layers with a window of their own."""
        positions = self._list_positions(seat, kept)  # [layers, heads, S]
        total = positions.shape[2]
        index = torch.arange(total - count, total, device=positions.device).expand(*positions.shape[:2], count)
        return Selection([index], positions[:, :, total - count :])

    def _count_by_column(self, scores: Sequence[Tensor], budget: int) -> list[int]:
        if len(scores) == 1:
            return [budget]
        return share_budget([each[0, 0] for each in scores], budget)

    def _score(self, past: Past) -> Tensor:
        """Return a layer's scores. Raises ValueError if the scorer returned something else."""
        scores = self._scorer.score(past)
        if not isinstance(scores, Tensor) or scores.shape != past.positions.shape:
            found = list(scores.shape) if isinstance(scores, Tensor) else scores
            raise ValueError(
                f"scorer {self._options.scorer!r} returned {found!r} instead of scores of shape "
                f"{list(past.positions.shape)}"
            )
        return scores

    def _list_positions(self, seat: CompressedSeat, kept: KeptTokens) -> Tensor:
        """Return the positions of all keys that unsplit heads hold, [layers, heads, S]."""
        new = torch.arange(seat.boundary, seat.length, device=kept.positions.device)
        return torch.cat((kept.positions, new.expand(*kept.positions.shape[:2], -1)), 2)

    def _make_pasts(
        self, seat: CompressedSeat, number: int, group: AddressGroup, states: dict[tuple[int, int], tuple[State, State]]
    ) -> list[list[Past]]:
        """Return what the scorer sees: by column, a Past of each layer; with split heads, each head is a column."""
        kept, buffer = seat.groups[number], self._queries
        queries = None if buffer is None else buffer.read(seat)
        columns = []
        new = torch.arange(seat.boundary, seat.length, device=kept.positions.device)
        for column, count in enumerate(kept.counts):
            heads = slice(column, column + 1) if group.split_heads else slice(0, group.num_heads)
            positions = kept.positions[:, heads, :count]
            positions = torch.cat((positions, new.expand(*positions.shape[:2], -1)), 2)
            pasts = []
            for i, layer in enumerate(group.layers):
                spec = self._setup.geometry.layers[layer]
                groups = spec.num_q_heads // spec.num_kv_heads
                of_layer = None if queries is None or buffer is None else queries[buffer.layers.index(layer)]
                if group.split_heads:
                    of_head = slice(column * groups, (column + 1) * groups)
                    sinks = None if spec.sink_logits is None else spec.sink_logits[of_head]
                    spec = spec._replace(num_kv_heads=1, num_q_heads=groups, sink_logits=sinks)
                    of_layer = None if of_layer is None else of_layer[:, of_head]
                state, key_state = states.get((layer, heads.start), ({}, {}))
                padded = {name: torch.nn.functional.pad(x, (0, seat.num_new)) for name, x in key_state.items()}
                pasts.append(
                    Past(
                        layer,
                        spec,
                        seat.length,
                        seat.num_new,
                        positions[i],
                        partial(self._memory.read_kv, seat, number, layer, column),
                        of_layer,
                        dict(state),
                        padded,
                        first_head=heads.start,
                    )
                )
            columns.append(pasts)
        return columns

    def _remember(
        self,
        pasts: Sequence[Sequence[Past]],
        indices: Sequence[Tensor],
        states: dict[tuple[int, int], tuple[State, State]],
    ) -> None:
        """Store what the scorer has left in `pasts`, of the keys that stay."""
        for column, index in zip(pasts, indices, strict=True):
            for past, of_layer in zip(column, index, strict=True):
                if past.state or past.key_state:
                    kept = {name: x.gather(1, of_layer) for name, x in past.key_state.items()}
                    states[past.layer_idx, past.first_head] = (past.state, kept)

    # ---------------------------------------------------------------- moving them
    def _copy(self, seat: CompressedSeat, number: int, selection: Selection) -> None:
        """Copy the keys and values that stay into the first spare blocks."""
        kept, group = seat.groups[number], self._memory.groups[number]
        size, device = self._memory.block_size, self._setup.arena.memory.device
        sources, targets, first = [], [], 0
        for blocks, index in zip(kept.blocks, selection.indices, strict=True):
            count = index.shape[2]
            used = -(-count // size)
            fresh = torch.tensor(kept.spare[first : first + used], dtype=torch.int64, device=device)
            first += used
            slot = torch.arange(count, device=device)
            targets.append(fresh[slot // size] * size + slot % size)  # [kept]
            index = index.to(device)
            sources.append(torch.tensor(blocks, device=device)[index // size] * size + index % size)
        for i, layer in enumerate(group.layers):
            if group.split_heads:  # blocks of one head: all heads in one call
                src, dst = torch.cat([each[i, 0] for each in sources]), torch.cat(targets)
            else:
                src, dst = sources[0][i].T.contiguous(), targets[0][:, None].expand(-1, group.num_heads).contiguous()
            self._setup.ops.copy_tokens(self._memory.stores[number], layer, src, dst)

    def _switch(self, seat: CompressedSeat, number: int, selection: Selection | None) -> None:
        """Make the fresh blocks those of the seat, and free the others; without a selection all keys stay."""
        kept = seat.groups[number]
        if selection is None:
            if self._memory.groups[number].split_heads:
                columns = [kept.positions[:, [c], :count] for c, count in enumerate(kept.counts)]
                new = torch.arange(seat.boundary, seat.length, device=kept.positions.device)
                kept.positions = _pad([torch.cat((x, new.expand(*x.shape[:2], -1)), 2) for x in columns])
            else:
                kept.positions = self._list_positions(seat, kept)
            kept.counts = [count + seat.num_new for count in kept.counts]
            return
        old, spare = kept.blocks, kept.spare
        kept.counts = [index.shape[2] for index in selection.indices]
        kept.positions, kept.blocks, kept.spare = selection.positions, [], []
        for count in kept.counts:
            used = -(-count // self._memory.block_size)
            kept.blocks.append(spare[:used])
            spare = spare[used:]
        self._memory.release(number, [*spare, *(block for blocks in old for block in blocks)])
        self._memory.tables[number].write(seat, number)


def _pad(positions: Sequence[Tensor]) -> Tensor:
    """Return positions [layers, heads, S], by column, as one tensor; heads with fewer end with -1."""
    most = max(each.shape[2] for each in positions)
    return torch.cat([torch.nn.functional.pad(each, (0, most - each.shape[2]), value=-1) for each in positions], 1)
