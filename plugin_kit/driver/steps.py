"""Steps of an engine: texts enter caches row by row, in batches of any strategies."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache_strategies.base import KVCache, KVSequence, Rows
from cache_strategies.errors import StrategyError
from cache_strategies.features import Gathering
from config.errors import SettingsError
from kernels.types import LayerSpec
from plugin_kit.driver.texts import RandomText
from server.engine.batch import Batch, RowInput
from server.engine.instance import Instance


def find_instance(cache: KVCache) -> Instance:
    """Return the instance of a strategy for batches, which raises what the strategy raises; always the same one."""
    owner = cache.setup.memory.shared.get_owner(cache.name)
    return owner if isinstance(owner, Instance) and owner.cache is cache else Instance(cache, raise_as_it_was)


def raise_as_it_was(fault: StrategyError) -> None:
    """Raise the error that is about to become a fault."""
    raise sys.exc_info()[1] or fault


@dataclass
class Reading:
    """A text that enters a cache row by row."""

    cache: KVCache
    text: RandomText
    sequence: KVSequence

    @property
    def left(self) -> int:
        return len(self.text) - self.sequence.length

    def work(self, num_tokens: int) -> RowInput:
        """Return a row of the next tokens, for which reserve() must succeed unless `room` says that there is room."""
        start = self.sequence.length
        has_room = self.sequence.room >= start + num_tokens or self.sequence.reserve(num_tokens)
        assert has_room, "reserve() returned False although there is memory"
        ids = self.text.ids[start : start + num_tokens]
        return RowInput(find_instance(self.cache), self.sequence, start, ids, num_tokens)

    def chunk(self, wanted: int) -> int:
        """Return the number of tokens of the next row: `wanted`, unless fewer are left or it has to end before."""
        return min(wanted, self.left, count_until_stop(self.sequence, wanted))


def count_until_stop(sequence: KVSequence, most: int) -> int:
    """Return how many tokens the next row of a sequence may have, at most `most`."""
    return most if sequence.stop is None else min(most, sequence.stop - sequence.length)


Keys = tuple[Tensor, Tensor, Tensor]  # K, V and positions that the last token of a row sees


@dataclass(frozen=True)
class StepOutputs:
    """The results of a step, by row in the order of the call."""

    starts: list[int]
    shifts: list[int]  # by how much the positions of a row's tokens are higher than those in the text
    outs: list[list[Tensor]]  # [row][layer] -> [n, Hq, Dv]
    keys: list[list[Keys]]  # [row][layer]; empty unless asked for


def step(rows: Sequence[tuple[Reading, int]], *, keys: bool = False) -> StepOutputs:
    """Run one step with rows of several texts, under any strategies."""
    for cache in {id(reading.cache): reading.cache for reading, _ in rows}.values():
        cache.poll()
    batch = Batch([reading.work(n) for reading, n in rows])
    result = attend(batch, rows, keys=keys)
    batch.commit()
    return result


def attend(batch: Batch, rows: Sequence[tuple[Reading, int]], *, keys: bool = False) -> StepOutputs:
    """Compute all layers of a located batch, without committing it."""
    in_order = [rows[i] for i in batch.row_order]
    at = {row: i for i, row in enumerate(batch.row_order)}
    sizes = [n for _, n in in_order]
    assert batch.input_ids.tolist() == [
        t for r, n in in_order for t in r.text.ids[r.sequence.length : r.sequence.length + n]
    ]
    layers = range(len(rows[0][0].text.q))
    outs = [attend_layer(batch, in_order, layer).split(sizes) for layer in layers]
    found = [[gather(*each, layer) for layer in layers] for each in iter_rows(batch)] if keys else []
    return StepOutputs(
        starts=[reading.sequence.length for reading, _ in rows],
        shifts=[-reading.sequence.shift for reading, _ in rows],
        outs=[[outs[layer][at[i]] for layer in layers] for i in range(len(rows))],
        keys=[found[at[i]] for i in range(len(rows))] if keys else [],
    )


def attend_layer(batch: Batch, in_order: Sequence[tuple[Reading, int]], layer: int) -> Tensor:
    """Compute one layer of a located batch, whose rows are in the batch's order."""
    q, k, v = (torch.cat(list(_inputs(in_order, part, layer))) for part in ("q", "k", "v"))
    shift = batch.positions - torch.cat([torch.arange(r.sequence.length, r.sequence.length + n) for r, n in in_order])
    spec = in_order[0][0].cache.setup.geometry.layers[layer]
    return batch.attend(layer, turn(spec, q, shift), turn(spec, k, shift), v)


def turn(spec: LayerSpec, x: Tensor, shift: Tensor) -> Tensor:
    """Return queries or keys x [N,H,D] of a text at positions that are higher by `shift` [N]."""
    return x if spec.rotate is None or not shift.any() else spec.rotate(x, shift)


def _inputs(rows: Sequence[tuple[Reading, int]], part: str, layer: int) -> Iterator[Tensor]:
    for reading, n in rows:
        yield getattr(reading.text, part)[layer][reading.sequence.length : reading.sequence.length + n]


def iter_rows(batch: Batch) -> Iterator[tuple[KVCache, Rows, int]]:
    """Yield for every row, in the batch's order, its cache, the cache's rows, and its index in them."""
    for instance, (rows, *_) in batch.parts:
        for row in range(len(rows)):
            yield instance.strategy, rows, row


def gather(cache: KVCache, rows: Rows, row: int, layer: int) -> Keys:
    """Return what the last token of a row sees in a layer. Raises SettingsError for a strategy that cannot say so."""
    if not isinstance(cache, Gathering):
        raise SettingsError(f"{type(cache).__name__} needs the method gather(), by which its keys are compared")
    return cache.gather(layer, rows, row)


def read_through(reading: Reading, chunk: int) -> list[Tensor]:
    """Return attention's output by layer [T, Hq, Dv] for a whole text, in rows of `chunk` tokens."""
    outs: list[list[Tensor]] = []
    while reading.left:
        outs += step([(reading, reading.chunk(chunk))]).outs
    return [torch.cat(parts) for parts in zip(*outs, strict=True)]
