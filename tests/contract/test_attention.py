"""Every strategy's attention equals the definition, in rows of any size and every dtype, alone and in one batch.

`make test` takes every chunk size in float32, and every second one in the narrow types; `make test-slow` takes all.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import Tensor

from cache_strategies.base import KVCache
from config.settings import StrategySettings
from tests.contract.harness import (
    MODEL,
    Reading,
    Step,
    Text,
    World,
    every_instance,
    random_text,
    step,
)
from tests.kernels.brute_force import KEEPS, attention, visible_keys

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LENGTH = {  # crosses a tile of the reference, the model's window many times, and the rings; the types wrap most rings
    torch.float32: 150,
    torch.float16: 60,
    torch.bfloat16: 60,
}
WHOLE = 1000

dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


def chunks_of(settings: StrategySettings, dtype: torch.dtype) -> list[int]:
    """Return the distinct row sizes among 1, 7, 64 and the whole text that the instance's max_row allows."""
    most = min(LENGTH[dtype], settings.options.get("max_row", WHOLE))
    return sorted({min(chunk, most) for chunk in (1, 7, 64, WHOLE)})


ALONE = [  # of the narrow types, a chunk size that one leaves out the other takes
    pytest.param(
        *(name, chunk, dtype),
        id=f"{name}-{chunk}-{str(dtype).removeprefix('torch.')}",
        marks=[] if dtype is torch.float32 or (i + j) % 2 == 0 else [pytest.mark.slow],
    )
    for name, settings in every_instance().items()
    for i, dtype in enumerate(TOLERANCE)
    for j, chunk in enumerate(chunks_of(settings, dtype))
]


@cache
def text_of(seed: int, length: int, dtype: torch.dtype) -> Text:
    return random_text(seed, length, MODEL, dtype)


@cache
def expected(kind: str, options: object, layer: int, text_key: tuple[int, int, torch.dtype]) -> Tensor:
    text = text_of(*text_key)
    mask = visible_keys(MODEL[layer], len(text), KEEPS[kind](options))
    return attention(text.q[layer], text.k[layer], text.v[layer], MODEL[layer], mask)


def check_step(result: Step, rows: list[tuple[Reading, int]]) -> None:
    """Check for any kind that gather_kv() returns exactly what the last token of each row attended to."""
    for (reading, n), start, outs, keys in zip(rows, result.starts, result.outs, result.keys, strict=True):
        last = start + n - 1
        for layer, (k, v, positions) in enumerate(keys):
            at = positions.long()
            assert at.tolist() == sorted(set(at.tolist()))
            assert at[-1] == last, "a token sees itself"
            assert torch.equal(k, reading.text.k[layer][at])
            assert torch.equal(v, reading.text.v[layer][at])
            everything = torch.ones(1, len(at), dtype=torch.bool)
            query = reading.text.q[layer][last : last + 1]
            want = attention(query, k, v, MODEL[layer], everything)
            close(outs[layer][-1:], want)


def close(got: Tensor, want: Tensor) -> None:
    assert not got.isnan().any(), "an unused slot was read"
    assert (got.double() - want).abs().max() < TOLERANCE[got.dtype]


def check_text(cache: KVCache, outs: list[Tensor], kind: str, text_key: tuple[int, int, torch.dtype]) -> None:
    """Compare the output of every token with the definition, for kinds whose visible keys are known."""
    if kind in KEEPS:
        for layer, out in enumerate(outs):
            close(out, expected(kind, cache.options, layer, text_key))


def read_alone(world: World, name: str, kind: str, chunk: int, dtype: torch.dtype) -> None:
    """Read one sequence in rows of `chunk` tokens, and check every step."""
    key = (1, LENGTH[dtype], dtype)
    reading = world.open(name, text_of(*key))
    outs: list[list[Tensor]] = []
    while reading.left:
        rows = [(reading, reading.chunk(chunk))]
        look = kind not in KEEPS or reading.left % 6 == 1  # what is known is checked below, token by token
        result = step(rows, keys=look)
        if look:
            check_step(result, rows)
        outs += result.outs
    world.check_integrity()
    check_text(reading.cache, [torch.cat(parts) for parts in zip(*outs, strict=True)], kind, key)


@pytest.mark.parametrize(("name", "chunk", "dtype"), ALONE)
def test_a_sequence_alone(name: str, chunk: int, dtype: torch.dtype) -> None:
    settings = every_instance()[name]
    world = World({name: settings}, dtype=dtype, max_seats=1)
    read_alone(world, name, settings.kind, chunk, dtype)


@dtypes
def test_all_strategies_in_one_batch_with_decode_rows_and_chunks(dtype: torch.dtype) -> None:
    read_mixed(every_instance(), dtype)


def read_mixed(strategies: dict[str, StrategySettings], dtype: torch.dtype) -> None:
    """Read two texts per instance in the same batches, in rows of random sizes."""
    world = World(strategies, dtype=dtype, max_seats=2)
    texts = {name: [(seed, LENGTH[dtype] - 7 * seed, dtype) for seed in (1, 2)] for name in strategies}
    readings = {(name, key): world.open(name, text_of(*key)) for name in strategies for key in texts[name]}
    outs: dict[tuple[str, tuple[int, int, torch.dtype]], list[list[Tensor]]] = {at: [] for at in readings}
    rng = random.Random(0)
    while unread := [at for at, reading in readings.items() if reading.left]:
        rng.shuffle(unread)
        chosen = unread[: rng.randint(1, len(unread))]
        rows = [(readings[at], readings[at].chunk(rng.choice([1, 1, 7, 40, 64]))) for at in chosen]
        result = step(rows, keys=True)
        check_step(result, rows)
        for at, out in zip(chosen, result.outs, strict=True):
            outs[at].append(out)
    world.check_integrity()
    for (name, key), parts in outs.items():
        whole = [torch.cat(layer) for layer in zip(*parts, strict=True)]
        check_text(world.caches[name], whole, strategies[name].kind, key)
