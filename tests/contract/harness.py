"""Drives caches for the contract tests: instances over one arena filled with NaN, texts, and steps of a `Batch`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cache_strategies import registry
from cache_strategies.arena import Arena
from cache_strategies.base import KVCache, Plan, Row, Seat
from cache_strategies.types import Geometry
from config.settings import StrategySettings
from kernels.ops import Ops
from kernels.reference.backend import ReferenceOps
from kernels.types import LayerSpec
from server.engine.batch import Batch, RowInput
from tests.contract import kinds

POISON = 0xFF  # every byte 0xFF: NaN in float32, float16 and bfloat16

MODEL = (  # two layers that have little in common
    LayerSpec(2, 4, 16, 8, scale=0.25),
    LayerSpec(1, 3, 8, 8, window=24, scale=0.4, softcap=4.0, sink_logits=torch.tensor([0.5, -1.0, 2.0])),
)

VARIANTS: Mapping[str, Sequence[Mapping[str, Any]]] = {  # options every built-in kind is tested with
    "compressed": [
        {"budget": 20, "every": 16, "recent": 4, "sinks": 2, "block_size": 8},
        {"budget": 0.3, "every": 10, "recent": 2, "by_layer": "pyramid", "scorer": "knorm", "block_size": 4},
        {"budget": 12, "every": 8, "recent": 3, "by_head": True, "scorer": "tova", "block_size": 16},
        {"budget": 24, "every": 20, "recent": 0, "scorer": "h2o", "by_head": True, "block_size": 16},
    ],
    "contiguous": [{}],
    "mirrored": [{}],
    "paged": [{}, {"block_size": 1}, {"block_size": 7}, {"block_size": 16, "prefix_cache": False}],
    "sliding_window": [
        {},
        {"window": 1, "sinks": 0, "max_row": 20},
        {"window": 5, "sinks": 4, "max_row": 64},
        {"window": 40, "sinks": 0},
        {"window": 30, "sinks": 4, "max_row": 7},
    ],
}


def list_kinds() -> list[str]:
    """Return the names of all kinds: built-in ones, plug-ins and those of tests/contract/kinds."""
    with kinds.installed():
        return sorted(registry.list_kinds())


def every_instance() -> dict[str, StrategySettings]:
    """Return instances of every registered kind, by a name with their options; unknown kinds with defaults."""
    return {
        _name(kind, options): StrategySettings(kind=kind, **options)
        for kind in list_kinds()
        for options in VARIANTS.get(kind, [{}])
    }


def exact_instances() -> dict[str, StrategySettings]:
    """Return instances that keep all keys of these texts: paged with several block sizes, an unwrapped ring."""
    return {
        "contiguous": StrategySettings(kind="contiguous"),
        "ring": StrategySettings(kind="sliding_window", window=512, sinks=0),
        "ring_with_sinks": StrategySettings(kind="sliding_window", window=400, sinks=4),
        **{f"paged_{n}": StrategySettings(kind="paged", block_size=n) for n in (1, 7, 16, 32, 64)},
    }


def _name(kind: str, options: Mapping[str, Any]) -> str:
    return "-".join([kind, *(f"{key}_{value}" for key, value in options.items())])


def make_ops() -> Ops:
    """Return the operations with which a World computes by default; conftest.py replaces them by each backend's."""
    return ReferenceOps()


class World:
    """Caches by name over one arena whose memory is filled with NaN, and methods that run steps."""

    def __init__(
        self,
        strategies: Mapping[str, StrategySettings],
        *,
        layers: Sequence[LayerSpec] = MODEL,
        dtype: torch.dtype = torch.float32,
        max_seats: int = 8,
        max_seq_len: int = 160,
        max_num_batched_tokens: int = 160,
        pages: int | None = None,
        ops: Ops | None = None,
        fill: int = POISON,
    ) -> None:
        """Make the caches. By default the arena fits `max_seats` sequences of max_seq_len per instance."""
        self.layers, self.dtype = layers, dtype
        instances = registry.resolve_instances(strategies)
        geometry = Geometry(layers, dtype, max_seats, max_seq_len, max_num_batched_tokens)
        page = registry.page_bytes(instances, geometry)
        if pages is None:
            pages = max_seats * sum(1 + 2 * _sequence_bytes(i, geometry) // page for i in instances)
        self.arena = Arena(pages, page)
        self.arena.memory.fill_(fill)
        self.caches = registry.build_caches(instances, geometry, self.arena, ops or make_ops())

    def open(self, name: str, text: Text, *, max_cached: int | None = None) -> Reading:
        """Open a seat for a whole text."""
        seat = self.caches[name].open(text.ids, max_cached=max_cached)
        assert seat is not None, "no room"
        return Reading(self.caches[name], text, seat)

    def check_integrity(self) -> None:
        self.arena.check_integrity()
        for cache in self.caches.values():
            cache.check_integrity()


def _sequence_bytes(instance: registry.Instance, geometry: Geometry) -> int:
    """Return the memory of the longest sequence in pages of its own block size; at most half of what others need."""
    return registry.compute_min_pages([instance], geometry) * registry.page_bytes([instance], geometry)


@dataclass(frozen=True)
class Text:
    """Token ids and, for each layer, the q [T,Hq,D], k [T,H,D], v [T,H,Dv] that a model would compute for them."""

    ids: list[int]
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]

    def __len__(self) -> int:
        return len(self.ids)

    def head(self, n: int) -> Text:
        """Return the text's first n tokens."""
        return Text(self.ids[:n], *([x[:n] for x in part] for part in (self.q, self.k, self.v)))


def random_text(seed: int, length: int, layers: Sequence[LayerSpec], dtype: torch.dtype = torch.float32) -> Text:
    """Return a random text, which has no common prefix with texts of other seeds."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, dim: int) -> Tensor:
        return torch.randn(length, heads, dim, generator=generator).to(dtype)

    return Text(
        ids=[seed * 100_000 + i for i in range(length)],
        q=[draw(spec.num_q_heads, spec.head_dim) for spec in layers],
        k=[draw(spec.num_kv_heads, spec.head_dim) for spec in layers],
        v=[draw(spec.num_kv_heads, spec.v_head_dim) for spec in layers],
    )


def spliced(a: Text, b: Text, at: int) -> Text:
    """Return `a` up to a position and `b` from there on."""

    def join(x: list[Tensor], y: list[Tensor]) -> list[Tensor]:
        return [torch.cat((i[:at], j[at:])) for i, j in zip(x, y, strict=True)]

    return Text(a.ids[:at] + b.ids[at:], join(a.q, b.q), join(a.k, b.k), join(a.v, b.v))


@dataclass
class Reading:
    """A text that enters a cache row by row."""

    cache: KVCache
    text: Text
    seat: Seat

    @property
    def left(self) -> int:
        return len(self.text) - self.seat.length

    def work(self, num_tokens: int) -> RowInput:
        """Return a row of the next tokens, for which grow() must succeed."""
        assert self.cache.grow(self.seat, num_tokens), "no room"
        start = self.seat.length
        ids = self.text.ids[start : start + num_tokens]
        return RowInput(self.cache, Row(self.seat, num_tokens), ids, num_tokens)

    def chunk(self, wanted: int) -> int:
        """Return the number of tokens of the next row: `wanted`, unless fewer are left or row_limit() is smaller."""
        return min(wanted, self.left, self.cache.row_limit(self.seat) or wanted)


Keys = tuple[Tensor, Tensor, Tensor]  # K, V and positions that the last token of a row sees


@dataclass(frozen=True)
class Step:
    """The results of a step, by row in the order of the call."""

    starts: list[int]
    outs: list[list[Tensor]]  # [row][layer] -> [n, Hq, Dv]
    keys: list[list[Keys]]  # [row][layer]; empty unless asked for


def step(rows: Sequence[tuple[Reading, int]], *, keys: bool = False) -> Step:
    """Run one step with rows of several texts, under any strategies."""
    for cache in {id(reading.cache): reading.cache for reading, _ in rows}.values():
        cache.poll()
    batch = Batch([reading.work(n) for reading, n in rows])
    result = attend(batch, rows, keys=keys)
    batch.commit()
    return result


def attend(batch: Batch, rows: Sequence[tuple[Reading, int]], *, keys: bool = False) -> Step:
    """Compute all layers of a planned batch, without committing it."""
    in_order = [rows[i] for i in batch.row_order]
    at = {row: i for i, row in enumerate(batch.row_order)}
    sizes = [n for _, n in in_order]
    assert batch.input_ids.tolist() == [t for r, n in in_order for t in r.text.ids[r.seat.length : r.seat.length + n]]
    layers = range(len(rows[0][0].text.q))
    outs = [
        batch.attend(layer, *(torch.cat(list(_inputs(in_order, part, layer))) for part in ("q", "k", "v"))).split(sizes)
        for layer in layers
    ]
    found = [[plan.gather_kv(layer, row) for layer in layers] for plan, row in _plans(batch)] if keys else []
    return Step(
        starts=[reading.seat.length for reading, _ in rows],
        outs=[[outs[layer][at[i]] for layer in layers] for i in range(len(rows))],
        keys=[found[at[i]] for i in range(len(rows))] if keys else [],
    )


def _inputs(rows: Sequence[tuple[Reading, int]], part: str, layer: int) -> Iterator[Tensor]:
    for reading, n in rows:
        yield getattr(reading.text, part)[layer][reading.seat.length : reading.seat.length + n]


def _plans(batch: Batch) -> Iterator[tuple[Plan, int]]:
    """Return the plan of every row and the row's index in it, in the batch's order."""
    for _, plan in batch._parts:
        for row in range(len(plan.rows)):
            yield plan, row


def read_through(reading: Reading, chunk: int) -> list[Tensor]:
    """Return attention's output by layer [T, Hq, Dv] for a whole text, in rows of `chunk` tokens."""
    outs: list[list[Tensor]] = []
    while reading.left:
        outs += step([(reading, reading.chunk(chunk))]).outs
    return [torch.cat(parts) for parts in zip(*outs, strict=True)]
