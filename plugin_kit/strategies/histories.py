"""Promises about calls in any order: random histories."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from cache_strategies import registry
from cache_strategies.spaces import find_space
from cache_strategies.types import EVERYTHING, NO_SALT, Salt, SaltScope
from kernels.types import LayerSpec
from plugin_kit.driver.history import LAYERS, History, geometry_of
from plugin_kit.driver.texts import rotate
from plugin_kit.promise import LAST_CALLS, promise
from plugin_kit.strategies.trial import NAME, StrategyTrial

NUM_HISTORIES, NUM_OPERATIONS = 6, 40
WINDOW = LayerSpec(1, 2, 8, 8, window=6, scale=1.0, rotate=rotate)
HYBRID = (WINDOW, WINDOW._replace(window=None, scale=0.5), WINDOW._replace(window=3), WINDOW)  # as in Gemma 3
SALTS = (NO_SALT, NO_SALT, NO_SALT, Salt("tenant", "salt"))
SCOPES = (EVERYTHING, SaltScope("", ""), SaltScope("tenant"), SaltScope("tenant", "salt"))


class Operation(NamedTuple):
    """An operation of a history, with the arguments that were drawn for it."""

    text: str
    call: Callable[[], object]


def draw_operation(history: History, rng: random.Random) -> Operation:
    """Draw an operation that is possible now."""
    which, any_ = rng.randrange(100), rng.random()
    if not history.open_texts or any_ < 0.2:
        rest = [rng.choice([0, 1, 1, -1]) for _ in range(rng.randint(0, 4))]
        most, times = rng.choice([None, None, None, 0, 6]), rng.randint(1, 3)
        begin_like, common, salt = rng.randrange(100), rng.randint(0, 16), rng.choice(SALTS)
        text = f"open {times} sequences (common={common}, salt={salt.tenant!r}, max_cached={most})"
        return Operation(text, lambda: history.open(which, begin_like, common, rest, salt, most, times))
    if any_ < 0.25:
        chosen = rng.randrange(100)
        return Operation("drop a cached prefix", lambda: history.drop_prefix(which, chosen))
    if any_ < 0.6:
        seed, fails = rng.randrange(2**16), rng.random() < 0.3
        text = f"{'a step that fails once' if fails else 'a step'} (seed {seed})"
        return Operation(text, lambda: history.step(random.Random(seed), fails=fails))
    if any_ < 0.68:
        return Operation("fork", lambda: history.fork(which))
    if any_ < 0.76:
        by = rng.randint(0, 9)
        return Operation(f"truncate by {by} or as many as `rewind` allows", lambda: history.truncate(which, by))
    if any_ < 0.88:
        spoiled = rng.random() < 0.25
        return Operation("spoil and close" if spoiled else "close", lambda: history.close(which, spoiled=spoiled))
    if any_ < 0.91:
        priority, ttl = rng.randint(0, 2), rng.choice([None, 1e-9, 1e9])
        text = f"later texts have priority {priority} and ttl {ttl}"
        return Operation(text, lambda: history.set_retention(priority, ttl))
    if any_ < 0.94:
        percent = rng.randint(1, 25)
        return Operation(f"evict {percent} % of the memory", lambda: history.evict(which, percent))
    if any_ < 0.97:
        floor, limit = rng.randint(0, 10), rng.randint(0, 120)
        return Operation(f"a share of {floor} to {limit} %", lambda: history.set_share(which, floor, limit))
    scope = rng.choice(SCOPES)
    return Operation("clear", lambda: history.clear(which, scope))


@promise(
    "any order of calls",
    "whatever the order of open, reserve, fork, truncate, commit and close, also with full memory: keys stay "
    "right, the bookkeeping adds up, and nothing leaks",
)
def check_histories(trial: StrategyTrial) -> None:
    """Play random operations in a memory that holds two and a half of the longest texts."""
    for number in range(NUM_HISTORIES):
        layers = LAYERS if number % 2 else HYBRID
        instances = registry.resolve_instances({NAME: trial.settings})
        least = registry.compute_least_bytes(instances, geometry_of(layers), find_space("cpu").round_block)
        history = History({NAME: trial.settings}, max(1, 5 * least // 2), trial.ops, trial.definition, layers)
        done: list[str] = []
        try:
            for _ in range(NUM_OPERATIONS):
                operation = draw_operation(history, trial.rng)
                done.append(operation.text)
                operation.call()
                history.check_books()
                history.check_progress()
            done.append("the end")
            history.finish()
        except Exception as error:  # a strategy may raise anything
            error.add_note(f"{LAST_CALLS} {', '.join(done[-6:])}")
            raise
