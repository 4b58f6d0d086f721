"""Promises about doing the same thing again, or in another way: replays, other rows, forks, rewinding, failed steps."""

from __future__ import annotations

from collections.abc import Sequence

from cache_strategies.base import KVSequence
from cache_strategies.features import SelfChecking
from plugin_kit.driver.failing_ops import FailingOps, InjectedError
from plugin_kit.driver.steps import Reading, attend, attend_layer, step
from plugin_kit.driver.texts import RandomText, random_text, spliced
from plugin_kit.driver.visible import check_last_queries
from plugin_kit.promise import promise
from plugin_kit.strategies.trial import (
    LENGTH,
    NAME,
    StrategyTrial,
    assert_same,
    assert_same_keys,
    get_cache,
    read_all,
    read_rows,
)
from server.engine.batch import Batch

LENGTH_OF_REPLAY = 70


# ---------------------------------------------------------------- the same text again
@promise(
    "replayable",
    "a sequence that is closed and computed again in the same rows keeps the same keys and gets the same bits",
    lambda trial: trial.contract.replayable,
)
def check_replay(trial: StrategyTrial) -> None:
    """Read a text, close it, read another one, and read the first one again in the same rows."""
    world, rows = trial.make_world(max_seats=2), trial.draw_rows(LENGTH_OF_REPLAY)
    first = trial.open(world, LENGTH_OF_REPLAY)
    outs, keys = read_all(first, rows)
    first.sequence.close()
    other = trial.open(world, LENGTH_OF_REPLAY, seed=2)  # takes memory, perhaps that of the first
    read_rows(other, trial.draw_rows(LENGTH_OF_REPLAY))
    again, found = read_all(trial.open(world, LENGTH_OF_REPLAY), rows)
    assert_same_keys(found, keys, f"a text that was computed again in the same rows, {rows}")
    assert_same(again, outs, f"a text that was computed again in the same rows, {rows}")


@promise(
    "chunk_invariant",
    "neither the keys that are kept nor a bit of attention depends on how a text is cut into rows",
    lambda trial: trial.contract.chunk_invariant,
)
def check_other_rows(trial: StrategyTrial) -> None:
    """Read a text in other rows, and compare the output of all its tokens and the keys of the last one."""
    wanted = None
    for rows in ([LENGTH_OF_REPLAY - 1, 1], *(trial.draw_rows(LENGTH_OF_REPLAY) for _ in range(2))):
        found = read_all(trial.open(trial.make_world(), LENGTH_OF_REPLAY), rows)
        wanted, what = wanted or found, f"a text in rows of {rows}, and in rows as long as they may be"
        assert_same_keys(found[1], wanted[1], what)
        assert_same([out[-1] for out in found[0]], [out[-1] for out in wanted[0]], what)
        # kernels may round in another way for rows of another size, but no more than that
        assert_same(found[0], wanted[0], what, tolerance=1e-5)


@promise("stop", "rows may end where `stop` says, and no text comes to an end by that")
def check_stops(trial: StrategyTrial) -> None:
    """Read a text in rows as long as `stop` allows."""
    world = trial.make_world()
    reading = trial.open(world)
    while reading.left:
        stop, length = reading.sequence.stop, reading.sequence.length
        assert stop is None or stop > length, f"`stop` is {stop} after {length} tokens, so the sequence cannot go on"
        rows = [(reading, reading.chunk(LENGTH))]
        check_last_queries(step(rows, keys=True), rows, trial.layers)


# ---------------------------------------------------------------- forks and rewinding
def overrides_fork(trial: StrategyTrial) -> bool:
    """Return whether sequences can be forked."""
    return type(trial.open(trial.make_world()).sequence).fork is not KVSequence.fork


@promise("forkable", "a fork has its parent's tokens, and neither changes the other's keys", overrides_fork)
def check_forks(trial: StrategyTrial) -> None:
    """Fork a sequence after its prompt and let all go on with other texts, also when the parent has been closed."""
    world, rng = trial.make_world(max_seats=3), trial.rng
    cache, at = get_cache(world), rng.randint(1, 100)
    common = random_text(0, LENGTH, trial.layers)
    parent = Reading(cache, common, world.open(NAME, common.head(at), max_cached=0).sequence)
    read_rows(parent, _cut(rng.randint(1, 40), at))
    readings = [parent]
    for seed in (1, 2):
        sequence = parent.sequence.fork()
        assert sequence is not None, "fork() returned None although there is memory"
        assert sequence.length == at, f"a fork of {at} tokens has {sequence.length}"
        readings.append(Reading(cache, spliced(common, random_text(seed, LENGTH, trial.layers), at), sequence))
    for sizes in ([1, 1, 1], [5, 1, 30], [1, 40, 2], [9, 9, 9]):
        rows = [(reading, n) for reading, wanted in zip(readings, sizes, strict=True) if (n := reading.chunk(wanted))]
        check_last_queries(step(rows, keys=True), rows, trial.layers)
        world.check_integrity()
        if sizes[0] == 5:
            readings.pop(0).sequence.close()
            readings.append(trial.open(world, seed=3))
    for reading in readings:
        reading.sequence.close()
    cache.evict(world.memory.total_bytes)
    assert not world.memory.held_bytes, "blocks are still held when parent and forks are closed"


def _cut(longest: int, length: int) -> list[int]:
    return [min(longest, length - start) for start in range(0, length, longest)]


@promise(
    "rewind",
    "up to `rewind` tokens at the end can be dropped, as if they had never been there",
    lambda trial: trial.contract.rewind != 0,
)
def check_rewind(trial: StrategyTrial) -> None:
    """Drop tokens at the end of a text, go on with another one, and compare with a text that was never longer."""
    world, rng = trial.make_world(max_seats=2), trial.rng
    cache = get_cache(world)
    reading = trial.open(world)
    read_rows(reading, [70])
    for round_ in range(6):
        if reading.left < 48:
            break
        before, rewind = reading.sequence.length, cache.contract.rewind
        most = min(before, 40 if rewind is None else rewind)
        length = before - (rng.randint(0, most) if round_ else most)
        reading.sequence.truncate(length)
        now = reading.sequence.length
        assert now <= length, f"a sequence of {before} tokens has {now} after truncate() to {length}"
        reading.text = spliced(reading.text, random_text(10 + round_, LENGTH, trial.layers), now)
        rows = [(reading, reading.chunk(7))]
        result = step(rows, keys=True)
        check_last_queries(result, rows, trial.layers)
        world.check_integrity()
        if cache.contract.chunk_invariant and cache.contract.replayable:
            other = world.open(NAME, reading.text.head(reading.sequence.length), max_cached=0)
            start = result.starts[0]
            read_rows(other, [start] if start else [])
            never_longer = step([(other, other.left)], keys=True)
            what = f"after truncate() from {before} to {length} tokens, compared with a text that was never longer"
            assert_same_keys(result.keys[0], never_longer.keys[0], what)
            other.sequence.close()
        read_rows(reading, [rng.choice([1, 9, 30])])


# ---------------------------------------------------------------- steps that fail
@promise(
    "survives a failed step",
    "a step that failed in any layer can be repeated, and gives the same bits: only commit() changes a sequence",
)
def check_failed_steps(trial: StrategyTrial) -> None:
    """Give up steps after some layers, or within an operation, and repeat them."""
    layers = (*trial.layers, *trial.layers)
    text, ops = random_text(1, 90, layers), FailingOps(trial.ops)
    clean = trial.make_world(layers=layers).open(NAME, text)
    world = trial.make_world(layers=layers, ops=ops)
    failing = world.open(NAME, text)
    for i, wanted in enumerate([20, 1, 1, 30, 7, 1, 20, 1, 9]):
        n = clean.chunk(wanted)
        if n == 0:
            break
        want = step([(clean, n)]).outs[0]
        work, rows = failing.work(n), [(failing, n)]
        if i % 2:
            ops.calls = i % len(layers)
            _expect_failure(Batch([work]), rows)
            ops.calls = None
        else:
            given_up = Batch([work])
            for layer in range(trial.rng.randint(0, len(layers))):
                attend_layer(given_up, rows, layer)
        start = failing.sequence.length
        assert start == clean.sequence.length - n, f"a failed step has changed a sequence's length to {start}"
        batch = Batch([work])
        found = attend(batch, rows).outs[0]
        batch.commit()
        assert_same(found, want, f"a step of {n} tokens at position {start} that failed once and was repeated")
    world.check_integrity()


def _expect_failure(batch: Batch, rows: Sequence[tuple[Reading, int]]) -> None:
    """Run a step that may fail, as operations are set to."""
    try:
        attend(batch, rows)
    except InjectedError:
        return


def overrides_compact(trial: StrategyTrial) -> bool:
    """Return whether the strategy drops tokens in compact()."""
    return type(trial.open(trial.make_world()).sequence).compact is not KVSequence.compact


@promise(
    "survives a failed compaction",
    "compact() that raised can be called again, and the sequence is as without the failure",
    overrides_compact,
)
def check_failed_compactions(trial: StrategyTrial) -> None:
    """Let copies within compact() fail at every place, call it again, and compare with a text without failures."""
    text, ops = random_text(1, LENGTH, trial.layers), FailingOps(trial.ops)
    clean = trial.make_world().open(NAME, text)
    world = trial.make_world(ops=ops)
    failing, calls = world.open(NAME, text), 0
    while clean.left:
        n = clean.chunk(40)
        want = step([(clean, n)], keys=True)
        rows = [(failing, n)]
        batch = Batch([failing.work(n)])
        found = attend(batch, rows, keys=True)
        assert_same_keys(found.keys[0], want.keys[0], "after a compact() that failed once and was repeated")
        assert_same(found.outs[0], want.outs[0], "after a compact() that failed once and was repeated")
        (start,) = found.starts
        failing.sequence.commit(failing.text.ids[start : start + n])
        ops.copies, calls = calls, calls + 1
        try:
            failing.sequence.compact()
        except InjectedError:
            failing.sequence.compact()
        else:
            calls = 0  # there were fewer copies
        ops.copies = None
        world.check_integrity()


@promise("rejected drafts leave no trace", "tokens that were located and not committed change nothing")
def check_rejected_drafts(trial: StrategyTrial) -> None:
    """Locate draft tokens of which some are rejected, and compare with a sequence that never saw them."""
    for accepted in (0, 1, 4):
        text, other = random_text(1, 120, trial.layers), random_text(2, 120, trial.layers)
        plain, drafted = (trial.make_world().open(NAME, text) for _ in range(2))
        while plain.left > 30:
            n = plain.chunk(13)
            found, wanted = (step([(reading, n)]).outs[0] for reading in (drafted, plain))
            assert_same(found, wanted, "a sequence with rejected draft tokens, and one without")
            right = plain.chunk(accepted)
            _speculate(drafted, other, drafted.chunk(6), right)
            if right:
                step([(plain, right)])
            assert drafted.sequence.length == plain.sequence.length, (
                f"{drafted.sequence.length} tokens are there after {right} accepted drafts, not {plain.sequence.length}"
            )
            if isinstance(drafted.cache, SelfChecking):
                drafted.cache.check_integrity()
        found, wanted = (step([(reading, 1)]).outs[0] for reading in (drafted, plain))
        assert_same(found, wanted, "a sequence with rejected draft tokens, and one without")


def _speculate(reading: Reading, other: RandomText, drafts: int, accepted: int) -> None:
    """Locate `drafts` draft tokens of which the first `accepted` are right; the others are rejected."""
    start, text = reading.sequence.length, reading.text
    reading.text = spliced(text, other, start + accepted)
    batch = Batch([reading.work(drafts)])
    attend(batch, [(reading, drafts)])
    assert not batch.commit([accepted])
    reading.text = text
