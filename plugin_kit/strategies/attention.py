"""Promises about what a strategy attends to: in rows of any size, in all dtypes, alone and beside other strategies.

The reference gets from gather(), or from a definition of the strategy if there is one, which positions are kept.
Their keys and values are the text's own, not the cache's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cache_strategies.visible import count_dropped_tokens
from config.settings import StrategySettings
from kernels.types import LayerSpec
from plugin_kit.driver.reference import attention
from plugin_kit.driver.steps import Keys, Reading, StepOutputs, count_until_stop, step
from plugin_kit.driver.texts import random_text, rotate, with_poison
from plugin_kit.driver.visible import Definition, check_keys, check_last_queries, check_outs, visible_in_text
from plugin_kit.driver.world import World
from plugin_kit.promise import promise
from plugin_kit.strategies.trial import LENGTH, NAME, WHOLE, StrategyTrial, assert_same, get_cache

CHUNKS = (1, 7, 64, WHOLE)
SHORT = 60  # tokens of a text of the smallest rows, and in the narrow types
DECODED = 4  # last tokens of a text, which enter one by one
NARROW = (torch.bfloat16, torch.float16)
BESIDE = {  # other strategies of a mixed batch
    "contiguous": StrategySettings(kind="contiguous"),
    "paged": StrategySettings(kind="paged", block_size=7, prefix_cache=False),
    "window": StrategySettings(kind="sliding_window", window=20, sinks=3, max_row=40),
}


# ---------------------------------------------------------------- alone
@promise(
    "attends to the keys it lists",
    "each query attends to the keys that gather() lists, which are those of the text at these positions, "
    "or if `unbounded` rotated to positions within the cache",
)
def check_attention(trial: StrategyTrial) -> None:
    """Read a text in rows of several sizes and dtypes, and check the last query of each row."""
    for dtype, chunk, length in _draw_cuts(trial):
        world = trial.make_world(dtype=dtype)
        reading = trial.open(world, length)
        while reading.left:
            rows = [(reading, _next_row(reading, chunk))]
            if chunk > 1 or trial.rng.random() < 0.3:
                check_last_queries(step(rows, keys=True), rows, trial.layers)
            else:
                step(rows)
        world.check_integrity()


@promise(
    "exact",
    "an instance whose contract says `exact` attends to every key that the model's own attention uses",
    lambda trial: trial.contract.exact,
)
def check_definition(trial: StrategyTrial) -> None:
    """Check all queries of a text against the definition of what the strategy keeps."""
    for dtype, chunk, length in _draw_cuts(trial):
        world = trial.make_world(dtype=dtype)
        reading = trial.open(world, length)
        while reading.left:
            rows = [(reading, _next_row(reading, chunk))]
            _check_row(step(rows, keys=True), reading, trial.layers, trial.definition)


def _draw_cuts(trial: StrategyTrial) -> list[tuple[torch.dtype, int, int]]:
    """Return dtypes, sizes of rows and lengths: all sizes that are allowed in float32, one in each narrow type.

    Texts of the smallest rows and in the narrow types are short.
    """
    first = trial.open(trial.make_world()).sequence
    chunks = sorted({count_until_stop(first, chunk) for chunk in CHUNKS})
    wide = [(torch.float32, chunk, SHORT if chunk < min(7, chunks[-1]) else LENGTH) for chunk in chunks]
    return [*wide, *((dtype, trial.rng.choice(chunks), SHORT) for dtype in NARROW)]


def _next_row(reading: Reading, chunk: int) -> int:
    return reading.chunk(min(chunk, max(1, reading.left - DECODED)))


def _check_row(result: StepOutputs, reading: Reading, layers: Sequence[LayerSpec], definition: Definition) -> None:
    start, end = result.starts[0], reading.sequence.length
    for layer, spec in enumerate(layers):
        q, k, v = (part[layer][:end] for part in (reading.text.q, reading.text.k, reading.text.v))
        mask = definition(reading.cache, reading.text.ids, layer, start, end - start)
        assert mask is not None
        listed = check_keys(k, v, result.keys[0][layer])
        wrong = (listed != mask[:, -1]).any(0).nonzero().flatten().tolist()
        assert not wrong, (
            f"the last of {end} tokens sees other keys in layer {layer} than it should: gather() is wrong about "
            f"positions {wrong[:8]}{'...' if len(wrong) > 8 else ''}"
        )
        where = f"layer {layer}, positions {start} to {end - 1}"
        check_outs(result.outs[0][layer], attention(q[start:], k, v, spec, mask), where)


# ---------------------------------------------------------------- what is dropped
def count_missing(keys: Sequence[Keys], layers: Sequence[LayerSpec], position: int) -> int:
    """Return how many keys the token at a position lacks beside the model's own attention, as a mean over KV heads.

    `keys` are by layer what it attended to. A token is not missed in the layers in which it is outside of the window.
    The mean of a layer is rounded up, as what count_visible() returns is rounded down.
    """
    missing, num_heads = 0, 0
    for (_, _, positions), spec in zip(keys, layers, strict=True):
        used = {p for p in range(position) if spec.window is None or position - p < spec.window}
        by_head = positions.view(len(positions), -1).expand(-1, spec.num_kv_heads)
        of_layer = sum(len(used - {*by_head[:, head].tolist()}) for head in range(spec.num_kv_heads))
        missing += spec.num_kv_heads * -(-of_layer // spec.num_kv_heads)
        num_heads += spec.num_kv_heads
    return missing // num_heads


MODELS: Sequence[Sequence[LayerSpec] | None] = (
    None,  # the layers of the trial
    (
        LayerSpec(1, 2, 8, 8, window=9, rotate=rotate),
        LayerSpec(3, 3, 8, 8, window=1, rotate=rotate),
        LayerSpec(2, 2, 8, 8, window=50, rotate=rotate),
    ),
    (LayerSpec(2, 2, 8, 8, rotate=rotate),),
)


@promise(
    "counts dropped tokens",
    "what follows from count_visible() is the number of keys that the next token would use, but does not see",
)
def check_dropped_count(trial: StrategyTrial) -> None:
    """Compare count_dropped_tokens() with the keys that the next token then attends to."""
    for layers in MODELS:
        world = trial.make_world(layers=layers or trial.layers)
        cache, text = get_cache(world), random_text(1, 110, world.layers)
        reading = world.open(NAME, text)
        while reading.left:
            position, counted = reading.sequence.length, count_dropped_tokens(cache, reading.sequence.length)
            assert not (cache.contract.exact and counted), f"an exact instance says that it has dropped {counted}"
            assert 0 <= counted <= position, f"count_dropped_tokens() returned {counted} of {position} tokens"
            size = reading.chunk(trial.rng.choice([1, 1, 1, 4, 30]))
            result = step([(reading, size)], keys=size == 1)
            if size == 1:  # the row's only token is the next token of the count
                missing = count_missing(result.keys[0], world.layers, position)
                assert counted == missing, (
                    f"count_dropped_tokens() returned {counted} before position {position}, whose token lacks {missing}"
                )


def finds_dropped_keys(trial: StrategyTrial) -> bool:
    """Return whether the instance drops a key that the model's own attention uses, in a text as the checks read."""
    reading = trial.open(trial.make_world())
    while reading.left:
        result = step([(reading, reading.chunk(16))], keys=True)
        if count_missing(result.keys[0], trial.layers, reading.sequence.length - 1):
            return True
    return False


# ---------------------------------------------------------------- beside others
@promise(
    "same bits in a mixed batch", "a sequence has the same bits alone as in a batch with other strategies and sequences"
)
def check_mixed_batch(trial: StrategyTrial) -> None:
    """Read texts of several strategies in the same batches, and each of them alone in the same rows."""
    dtype = trial.rng.choice([torch.float32, *NARROW])
    strategies = {NAME: trial.settings, **BESIDE}
    world = World(strategies, trial.ops, dtype=dtype, max_seats=2, layers=trial.layers)
    texts = [random_text(seed, trial.rng.randint(20, 90), trial.layers, dtype) for seed in range(2 * len(strategies))]
    readings = [world.open(name, text, max_cached=0) for name, text in zip([*strategies] * 2, texts, strict=True)]
    rows: list[list[tuple[int, list[Tensor]]]] = [[] for _ in readings]
    is_first = True
    while unread := [i for i, reading in enumerate(readings) if reading.left]:
        trial.rng.shuffle(unread)
        chosen = unread if is_first else unread[: trial.rng.randint(1, len(unread))]
        is_first = False
        sizes = [readings[i].chunk(trial.rng.choice([1, 1, 7, 19])) for i in chosen]
        result = step([(readings[i], n) for i, n in zip(chosen, sizes, strict=True)])
        for i, n, outs in zip(chosen, sizes, result.outs, strict=True):
            rows[i].append((n, outs))
        world.check_integrity()
    for i, reading in enumerate(readings):
        name = reading.cache.name
        alone = World({name: strategies[name]}, trial.ops, dtype=dtype, max_seats=1, layers=trial.layers)
        again = alone.open(name, texts[i], max_cached=0)
        for n, outs in rows[i]:
            where = f"{'the strategy' if name == NAME else name}, row of {n} at position {again.sequence.length}"
            assert_same(outs, step([(again, n)]).outs[0], f"{where}, in a batch with others and alone ({dtype})")


POISONS = (torch.nan, torch.inf, -torch.inf)


@promise(
    "NaN stays in its sequence", "NaN and infinity reach no other sequence, and no query that does not see the token"
)
def check_nan_isolation(trial: StrategyTrial) -> None:
    """Replace some tokens of one text and all of a second one by NaN or infinity, and compare the first one's bits."""
    rng, length = trial.rng, 70
    chunk, bad, poison = rng.choice([1, 7, 33, length]), sorted(rng.sample(range(length), 3)), rng.choice(POISONS)
    dtype = rng.choice([torch.float32, *NARROW])
    text, other = (random_text(seed, length, trial.layers, dtype) for seed in (1, 2))
    spoilt = with_poison(other, range(length), poison)
    clean = _read_pair(trial, [text, other], chunk, dtype)
    beside = _read_pair(trial, [text, spoilt], chunk, dtype)
    found = _read_pair(trial, [with_poison(text, bad, poison), spoilt], chunk, dtype)
    cache = get_cache(trial.make_world())
    for layer, spec in enumerate(trial.layers):
        what = f"{poison} in another sequence reached this one in layer {layer}"
        assert _same_bits(clean[layer], beside[layer]), what
        longest = count_until_stop(trial.open(trial.make_world()).sequence, chunk)
        mask = visible_in_text(cache, trial.definition, text.ids, layer, longest)
        unaware = ~mask[:, :, bad].any(2).repeat_interleave(spec.num_q_heads // spec.num_kv_heads, 0).T  # [T, Hq]
        reached = f"{poison} at positions {bad} reached queries in layer {layer} that do not see these, rows of {chunk}"
        assert _same_bits(clean[layer][unaware], found[layer][unaware]), reached


def _read_pair(trial: StrategyTrial, texts: Sequence[object], chunk: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the attention output of the first text by layer, read together with the others."""
    world = trial.make_world(dtype=dtype, max_seats=len(texts))
    readings = [world.open(NAME, text, max_cached=0) for text in texts]  # type: ignore[arg-type]
    outs: list[list[Tensor]] = []
    while any(reading.left for reading in readings):
        outs.append(step([(r, r.chunk(chunk)) for r in readings]).outs[0])
    return [torch.cat(parts) for parts in zip(*outs, strict=True)]


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
