"""Attention of a residual cache by its definition, in float64: each query over keys in full and keys as quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cache_strategies.residual.cache import ResidualCache
from cache_strategies.types import Text
from config.settings import StrategySettings
from kernels.kv_formats import Plane
from kernels.types import LayerSpec
from plugin_kit.driver.reference import attention, visible_keys
from plugin_kit.driver.steps import Reading, StepOutputs, step
from plugin_kit.driver.texts import RandomText
from tests.contract.harness import World

LENGTH, SINKS, BLOCK = 6, 3, 4  # residual_length, sinks, block_size
LAYERS = (
    LayerSpec(2, 6, 16, 72, scale=0.25, k_mean=3 * torch.randn(2, 16, generator=torch.Generator().manual_seed(1))),
    LayerSpec(1, 2, 128, 24, scale=0.1, window=20),
    LayerSpec(1, 3, 8, 8, scale=0.4, window=5, softcap=4.0),  # narrower than what is read in full
    LayerSpec(2, 2, 8, 16, scale=0.4, window=9, sink_logits=torch.tensor([0.5, -1.0])),
    LayerSpec(2, 4, 64, 8, scale=0.2, softcap=5.0, sink_logits=torch.tensor([0.5, -1.0, 2.0, 0.0])),
)
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 3e-2}


def make_world(
    *,
    layers: Sequence[LayerSpec] = LAYERS,
    dtype: torch.dtype = torch.float32,
    memory_bytes: int | None = None,
    max_seats: int = 4,
    **options: object,
) -> World:
    """Return a world with the instance "residual"."""
    small = {"residual_length": LENGTH, "sinks": SINKS, "block_size": BLOCK}
    settings = StrategySettings.model_validate({"kind": "residual", **small, **options})
    return World({"residual": settings}, layers=layers, dtype=dtype, max_seats=max_seats, memory_bytes=memory_bytes)


@dataclass
class Read:
    """A text that is read, and which of its tokens the sequence knows as they were computed."""

    reading: Reading
    lost: set[int] = field(default_factory=set)  # positions of tokens that it knows as they are quantized

    @property
    def cache(self) -> ResidualCache:
        assert isinstance(self.reading.cache, ResidualCache)
        return self.reading.cache

    @property
    def length(self) -> int:
        return self.reading.sequence.length

    def fork(self, text: RandomText) -> Read:
        """Return a fork that goes on with another text."""
        sequence = self.reading.sequence.fork()
        assert sequence is not None
        return Read(Reading(self.cache, text, sequence), set(self.lost))

    def truncate(self, text: RandomText, length: int, *, overwritten: int) -> None:
        """Drop tokens, and go on with another text; the ring has overwritten what is before a position."""
        self.reading.sequence.truncate(length)
        self.reading.text = text
        self.lost |= set(range(self.cache.options.sinks, overwritten))
        self.lost &= set(range(length))


def open_text(world: World, text: RandomText, *, max_cached: int | None = None, has_sinks: bool = True) -> Read:
    """Open a sequence for a text; of found tokens it has the sinks as they were computed, unless they were evicted."""
    cache = world.caches["residual"]
    assert isinstance(cache, ResidualCache)
    sequence = cache.open(Text(text.ids, max_cached=max_cached))
    assert sequence is not None, "no room"
    return Read(Reading(cache, text, sequence), set(range(cache.options.sinks * has_sinks, sequence.length)))


def read_rows(rows: Sequence[tuple[Read, int]]) -> None:
    """Read rows of these texts in one step, and check it."""
    check(step([(read.reading, n) for read, n in rows], keys=True), [read for read, _ in rows])


def check(result: StepOutputs, reads: Sequence[Read]) -> None:
    """Check each query of a step, and the keys and values that gather() says the last one of each row has read."""
    for i, (read, start) in enumerate(zip(reads, result.starts, strict=True)):
        for layer, spec in enumerate(read.cache.setup.geometry.layers):
            out = result.outs[i][layer]
            end, tolerance = start + len(out), TOLERANCE[out.dtype]
            quantized, in_full = list_keys(read, layer, end)
            for position in range(start, end):
                k, v = choose_keys(read, quantized, in_full, position)
                q, seen = read.reading.text.q[layer][position], visible_keys(spec, end, first=position)[:1]
                error = float((out[position - start] - attention(q[None], k, v, spec, seen)[0]).abs().max())
                assert error < tolerance, f"layer {layer}, position {position}: attention differs by {error:.2g}"
            found_k, found_v, positions = result.keys[i][layer]
            assert torch.equal(positions, seen[0].nonzero()[:, 0])
            assert torch.equal(found_k.double(), k[seen[0]])
            assert torch.equal(found_v.double(), v[seen[0]])


def list_keys(read: Read, layer: int, end: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the keys and values [end, H, D] of a text as quantized blocks have them, and as the ring has them."""
    text, spec, stored = read.reading.text, read.cache.setup.geometry.layers[layer], read.cache.store.formats
    center = spec.k_mean if stored.k.centered and stored.k.is_quantized else None
    quantized, in_full = [], []
    for x, format, minus in ((text.k[layer][:end], stored.k, center), (text.v[layer][:end], stored.v, None)):
        encoded = format.encode(x if minus is None else x.float() - minus)
        quantized.append(Plane(format, encoded.numbers, encoded.scale, minus).decode())
        lost = torch.tensor([position in read.lost for position in range(end)])
        in_full.append(torch.where(lost[:, None, None], quantized[-1].to(x.dtype), x))
    return quantized, in_full


def choose_keys(
    read: Read, quantized: Sequence[Tensor], in_full: Sequence[Tensor], position: int
) -> tuple[Tensor, Tensor]:
    """Return the keys and values as the query at a position reads them, float64."""
    where, options = torch.arange(len(quantized[0])), read.cache.options
    is_full = ((where < options.sinks) | (where > position - options.residual_length))[:, None, None]
    k, v = (torch.where(is_full, b.double(), a.double()) for a, b in zip(quantized, in_full, strict=True))
    return k, v
