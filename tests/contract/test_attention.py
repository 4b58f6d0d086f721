"""Every strategy's attention equals the definition, in rows of any size and every dtype, alone and in one batch.

The reference gets from the strategy's definition, or else from gather(), which tokens are kept; their keys and
values are the text's own, not the cache's. `make test` takes every chunk size in float32, and every second one in the
narrow types; `make test-slow` takes all. Where every step would be compared, other ones are drawn in each run.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import Tensor

from cache_strategies.base import KVCache
from cache_strategies.compressed.cache import CompressedCache
from config.settings import StrategySettings
from plugin_kit.driver.reference import TOLERANCE, attention, keep_all, visible_keys
from plugin_kit.driver.steps import Reading, StepOutputs, step
from plugin_kit.driver.texts import MODEL, RandomText, random_text
from plugin_kit.driver.visible import check_keys
from tests.contract.harness import World, every_instance
from tests.contract.kinds import KINDS
from tests.contract.rotary import find_streaming
from tests.contract.visible_tokens import find_keeps, visible_in_row
from tests.kernels.brute_force import KEEPS

LENGTH = {  # crosses a tile of the reference, the model's window many times, and the rings; the types wrap most rings
    torch.float32: 150,
    torch.float16: 60,
    torch.bfloat16: 60,
}
WHOLE = 1000
MIXED = 60  # tokens of the longest text in a batch of all strategies
DECODED = 4  # last tokens of a text, which enter one by one

dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


def chunks_of(settings: StrategySettings, dtype: torch.dtype) -> list[int]:
    """Return the distinct row sizes that the instance allows, among a few and the whole text."""
    longest = settings.options.get("every" if settings.kind in ("compressed", "streaming") else "max_row", WHOLE)
    most = min(LENGTH[dtype], longest)
    sizes = (1, 3, 7, WHOLE) if settings.kind in KINDS else (1, 7, 64, WHOLE)
    return sorted({min(chunk, most) for chunk in sizes})


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
def text_of(seed: int, length: int, dtype: torch.dtype) -> RandomText:
    return random_text(seed, length, MODEL, dtype)


@cache
def expected(kind: str, options: object, layer: int, text_key: tuple[int, int, torch.dtype]) -> Tensor:
    text = text_of(*text_key)
    mask = visible_keys(MODEL[layer], len(text), KEEPS[kind](options) if kind in KEEPS else keep_all)
    return attention(text.q[layer], text.k[layer], text.v[layer], MODEL[layer], mask)


def check_step(result: StepOutputs, rows: list[tuple[Reading, int]], kinds: list[str]) -> None:
    """Check each row in each layer: what gather() returns, and the output of the queries of which it is known."""
    for i, ((reading, n), start, kind) in enumerate(zip(rows, result.starts, kinds, strict=True)):
        for layer, keys in enumerate(result.keys[i]):
            mask = visible_in_row(reading.cache, kind, reading.text.ids, layer, start, n)
            end = start + n
            q, k, v = (part[layer][:end] for part in (reading.text.q, reading.text.k, reading.text.v))
            q, rounded, tolerance = q[start:], 0.0, TOLERANCE[q.dtype]
            if (streaming := find_streaming(reading.cache, kind)) is not None:
                rounded = streaming.count_rotations() * torch.finfo(k.dtype).eps
                tolerance *= streaming.count_rotations()
                q, k = streaming.place(q, k, start)
            last = check_keys(k, v, keys, rounding=rounded)
            if mask is None:
                mask = extend_to_row(last, n) if is_compressed(reading.cache, layer) else last[:, None]
            assert torch.equal(mask[:, -1], last), "gather() returns other tokens than are visible"
            queries = mask.shape[1]
            close(result.outs[i][layer][-queries:], attention(q[-queries:], k, v, MODEL[layer], mask), tolerance)


def is_compressed(cache: KVCache, layer: int) -> bool:
    """Return whether a layer keeps all keys of a row for all of its queries, as keys are dropped between rows."""
    return isinstance(cache, CompressedCache) and MODEL[layer].window is None


def extend_to_row(last: Tensor, n: int) -> Tensor:
    """Return what the last n queries see [H, n, T] of the keys that the last one sees [H, T]."""
    end = last.shape[1]
    return last[:, None] & (torch.arange(end) <= torch.arange(end - n, end)[:, None])


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert not got.isnan().any(), "an unused slot was read"
    assert (got.double() - want).abs().max() < tolerance


def check_text(cache: KVCache, outs: list[Tensor], kind: str, text_key: tuple[int, int, torch.dtype]) -> None:
    """Compare the output of every token with the definition, if that does not depend on rows."""
    if find_keeps(cache, kind) is not None:
        for layer, out in enumerate(outs):
            close(out, expected(kind, cache.options, layer, text_key), TOLERANCE[out.dtype])


def read_alone(world: World, name: str, kind: str, chunk: int, dtype: torch.dtype, rng: random.Random) -> None:
    """Read one sequence in rows of `chunk` tokens and its end one by one; check some steps of the small ones."""
    key = (1, LENGTH[dtype], dtype)
    reading = world.open(name, text_of(*key))
    is_known = find_keeps(reading.cache, kind) is not None  # then check_text() looks at every token
    outs: list[list[Tensor]] = []
    while reading.left:
        rows = [(reading, reading.chunk(min(chunk, max(1, reading.left - DECODED))))]
        look = rng.random() < (1 / 6 if is_known else 1 if rows[0][1] > 7 else 1 / 3)
        result = step(rows, keys=look)
        if look:
            check_step(result, rows, [kind])
        outs += result.outs
    world.check_integrity()
    check_text(reading.cache, [torch.cat(parts) for parts in zip(*outs, strict=True)], kind, key)


@pytest.mark.parametrize(("name", "chunk", "dtype"), ALONE)
def test_a_sequence_alone(name: str, chunk: int, dtype: torch.dtype, rng: random.Random) -> None:
    settings = every_instance()[name]
    world = World({name: settings}, dtype=dtype, max_seats=1)
    read_alone(world, name, settings.kind, chunk, dtype, rng)


@pytest.mark.every_backend
@dtypes
def test_all_strategies_in_one_batch_with_decode_rows_and_chunks(dtype: torch.dtype, rng: random.Random) -> None:
    read_mixed(every_instance(), dtype, rng)


def read_mixed(strategies: dict[str, StrategySettings], dtype: torch.dtype, looks: random.Random) -> None:
    """Read two texts per instance in the same batches, in rows of random sizes, and check some of the steps."""
    world = World(strategies, dtype=dtype, max_seats=2)
    texts = {name: [(seed, MIXED - 7 * seed, dtype) for seed in (1, 2)] for name in strategies}
    readings = {(name, key): world.open(name, text_of(*key)) for name in strategies for key in texts[name]}
    outs: dict[tuple[str, tuple[int, int, torch.dtype]], list[list[Tensor]]] = {at: [] for at in readings}
    rng = random.Random(0)
    while unread := [at for at, reading in readings.items() if reading.left]:
        rng.shuffle(unread)
        chosen = unread[: rng.randint(1, len(unread))]
        rows = [(readings[at], readings[at].chunk(rng.choice([1, 1, 7, 40, 64]))) for at in chosen]
        look = looks.random() < 1 / 3
        result = step(rows, keys=look)
        if look:
            check_step(result, rows, [strategies[name].kind for name, _ in chosen])
        for at, out in zip(chosen, result.outs, strict=True):
            outs[at].append(out)
    world.check_integrity()
    for (name, key), parts in outs.items():
        whole = [torch.cat(layer) for layer in zip(*parts, strict=True)]
        check_text(world.caches[name], whole, strategies[name].kind, key)
