"""The promise about texts that go on past `max_seq_len`, with positions that are counted within the cache."""

from __future__ import annotations

from cache_strategies.types import Text
from plugin_kit.driver.steps import Reading, step
from plugin_kit.driver.texts import random_text
from plugin_kit.driver.visible import check_last_queries
from plugin_kit.driver.world import World
from plugin_kit.promise import promise
from plugin_kit.strategies.trial import NAME, StrategyTrial, get_cache

TIMES = 3  # max_seq_len, as often as a text is longer at least


@promise(
    "unbounded",
    "a text goes on past max_seq_len, at positions below it and in no more memory than the longest prompt",
    lambda trial: trial.contract.unbounded,
)
def check_unbounded(trial: StrategyTrial) -> None:
    """Read a text several times as long as max_seq_len, in no more memory than the longest prompt may take."""
    world = trial.make_world()
    cache = get_cache(world)
    most = cache.setup.geometry.max_seq_len
    text = random_text(1, TIMES * most + trial.rng.randint(1, most), trial.layers)
    promised, longer = (world.count_bytes(NAME, length) for length in (most, len(text)))
    assert longer <= promised, (
        f"sizes() says that {len(text)} tokens take {longer} bytes, and that the longest prompt takes {promised}"
    )
    sequence = cache.open(Text(text.ids[: trial.rng.randint(1, most)], max_cached=0))  # the rest is generated
    assert sequence is not None, "open() returned None although there is memory"
    reading = Reading(cache, text, sequence)
    while reading.left:
        _read_row(trial, world, reading, promised)
    world.check_integrity()


def _read_row(trial: StrategyTrial, world: World, reading: Reading, promised: int) -> None:
    """Read a row of any size; check its positions, its last query, and the memory before and after the step."""
    cache = reading.cache
    n, most = reading.chunk(trial.rng.choice([1, 9, 40])), cache.setup.geometry.max_seq_len
    start = reading.sequence.length
    position = start - reading.sequence.shift
    assert position + n <= most, (
        f"a row of {n} at token {start} begins at position {position}, and the model has {most}: `shift` must "
        "make positions count within the cache, and `stop` end rows there"
    )
    assert reading.sequence.reserve(n), f"reserve() returned False at token {start}, although there is memory"
    held = [world.memory.held_bytes]
    rows = [(reading, n)]
    is_checked = trial.rng.random() < 0.2 or n == reading.left
    result = step(rows, keys=is_checked)
    if is_checked:
        check_last_queries(result, rows, trial.layers)
    held.append(world.memory.held_bytes)
    assert max(held) <= promised, (
        f"a sequence of {start + n} tokens holds {max(held)} bytes, more than sizes() says of the longest prompt: "
        f"{promised}"
    )
