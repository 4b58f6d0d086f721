"""What `compressed` keeps, frees and refuses: against a definition that knows positions and keys alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_strategies import registry
from cache_strategies.compressed.cache import CompressedCache, CompressedSequence
from cache_strategies.compressed.selection import share_budget
from cache_strategies.compressed.state import KeptTokens
from cache_strategies.scorers import BUILTIN
from cache_strategies.scorers.base import Past
from cache_strategies.scorers.knorm import KNorm
from cache_strategies.spaces import find_space
from cache_strategies.types import Geometry
from config.errors import SettingsError
from config.settings import StrategySettings
from kernels.reference.backend import ReferenceOps
from kernels.store import KVStore
from kernels.types import LayerSpec
from plugin_kit.driver.steps import Reading, attend, step
from plugin_kit.driver.texts import MODEL, random_text
from plugin_kit.scorers.texts import rotate
from server.engine.batch import Batch
from tests.cache_strategies.cache_driver import count_bytes, count_held_blocks
from tests.contract.harness import World
from tests.kernels.backend_matrix import BACKENDS, NAMES

FULL = MODEL[0]._replace(num_q_heads=6, rotate=partial(rotate, rotated=MODEL[0].head_dim))
LAYERS = (FULL, FULL._replace(scale=0.5))
SMALL: dict[str, Any] = {  # options with which boundaries 24 tokens apart are enough
    "snapkv": {"window": 8},
    "r_kv": {"window": 8},
    "lagkv": {"lag_size": 8},
    "expected_attention": {"num_future_positions": 16},
}


def make_world(layers: Sequence[LayerSpec] = LAYERS, max_seats: int = 2, **options: Any) -> World:
    return World({"it": StrategySettings(kind="compressed", **options)}, layers=layers, max_seats=max_seats)


def read(reading: Reading, end: int, rng: random.Random | None = None) -> Iterator[tuple[int, list[Any]]]:
    """Read a text up to a position in random rows; yield the number of tokens and the keys of each row."""
    while reading.sequence.length < end:
        wanted = min(end - reading.sequence.length, 1000 if rng is None else rng.choice([1, 2, 7, 30]))
        keys = step([(reading, reading.chunk(wanted))], keys=True).keys[0]
        yield reading.sequence.length, keys


# ---------------------------------------------------------------- which keys stay
def kept_by_norm(keys: Tensor, length: int, every: int, budget: int, sinks: int, recent: int) -> list[int]:
    """Return the positions that one head keeps of its keys [T, D] after `length` tokens, by the definition."""
    kept: list[int] = []
    norms = keys.double().norm(dim=1).tolist()
    for end in range(every, length + 1, every):
        kept += range(end - every, end)
        first = [p for p in kept if p < sinks or p >= end - recent]
        others = sorted((p for p in kept if p not in first), key=lambda p: norms[p])
        kept = sorted([*first, *others[: max(0, budget - len(first))]])
    return kept + list(range(length // every * every, length))


def test_the_keys_of_least_norm_stay_with_those_that_are_protected(rng: random.Random) -> None:
    every, sinks, recent = rng.choice([5, 16, 33]), rng.randint(0, 3), rng.randint(0, 4)
    budget = sinks + recent + rng.randint(1, 30)
    print(every, sinks, recent, budget)
    world = make_world(scorer="knorm", every=every, sinks=sinks, recent=recent, budget=budget, block_size=8)
    text = random_text(rng.randrange(99), 150, LAYERS)
    end = 0
    for length, keys in read(world.open("it", text), 150, rng):
        for layer, (_, _, positions) in enumerate(keys):
            for head in range(FULL.num_kv_heads):
                expected = kept_by_norm(text.k[layer][:, head], end, every, budget, sinks, recent)
                assert positions[:, head].tolist() == [*expected, *range(end, length)]
        end = length
        world.check_integrity()


@pytest.mark.parametrize("scorer", sorted(BUILTIN))
@pytest.mark.parametrize("backend", NAMES)
def test_what_stays_does_not_depend_on_how_a_text_is_cut(backend: str, scorer: str, rng: random.Random) -> None:
    options = {"every": 24, "recent": 3, "budget": rng.choice([30, 0.4]), "by_head": rng.random() < 0.5}
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    format = rng.choice(["model", "int8"])
    print(options, dtype, format)
    settings = StrategySettings(
        kind="compressed",
        scorer=scorer,
        scorer_options=SMALL.get(scorer, {}),
        block_size=16,
        k_dtype=format,
        v_dtype=format,
        **options,
    )
    length = 80  # past three boundaries, of which the last two drop keys
    text = random_text(1, length, LAYERS, dtype)
    found = []
    for cut in (None, rng):
        world = World({"it": settings}, layers=LAYERS, dtype=dtype, max_seats=1, ops=BACKENDS[backend]())
        *_, (_, keys) = read(world.open("it", text), length, cut)
        world.check_integrity()
        found.append(keys)
    for layer, (k, v, positions) in enumerate(found[0]):
        check_stored(k, text.k[layer], positions, format)
        check_stored(v, text.v[layer], positions, format)
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def check_stored(kept: Tensor, computed: Tensor, positions: Tensor, format: str) -> None:
    """Check that what is kept [S,H,D] is what was computed [T,H,D] at these positions [S,H], bit for bit but int8."""
    heads = torch.arange(kept.shape[1])
    want = computed[positions.clamp_min(0), heads].masked_fill((positions < 0)[..., None], 0.0)
    got = kept.masked_fill((positions < 0)[..., None], 0.0)
    if format == "int8":
        torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=computed.abs().max().item() / 200)
    else:
        assert torch.equal(got, want)


def test_heads_share_a_budget_by_their_scores_and_each_keeps_its_safe_share() -> None:
    high, low = torch.arange(100.0), torch.arange(50.0) / 100
    assert share_budget([high, low], 20) == [36, 4]  # a fifth of 20 is safe
    assert share_budget([low, high], 20) == [4, 36]
    assert share_budget([high[:10] + 1, low], 20) == [10, 30], "a head cannot keep more keys than it has"


def test_the_first_layers_of_a_pyramid_keep_more_and_all_keep_the_mean() -> None:
    layers = [FULL] * 5
    world = make_world(layers, budget=60, every=50, recent=4, by_layer="pyramid")
    reading = world.open("it", random_text(2, 151, layers))
    for _ in read(reading, 150):
        pass
    counts = [kept.counts[0] for kept in reading.sequence.groups]  # type: ignore[attr-defined]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]
    assert abs(sum(counts) / 5 - 60) <= 1


@pytest.mark.parametrize("scorer", ["tova", "h2o", "keydiff"])
def test_a_model_whose_layers_all_have_a_window_keeps_its_windows(scorer: str, rng: random.Random) -> None:
    layers = [FULL._replace(window=20), FULL._replace(window=7)]
    world = make_world(layers, scorer=scorer, budget=40, every=16, recent=3)
    for length, keys in read(world.open("it", random_text(1, 90, layers)), 90, rng):
        for (_, _, positions), spec in zip(keys, layers, strict=True):
            assert spec.window is not None
            assert positions[:, 0].tolist() == list(range(max(0, length - spec.window), length))
        world.check_integrity()


# ---------------------------------------------------------------- memory
@pytest.mark.parametrize("by_head", [False, True])
def test_the_memory_of_dropped_keys_is_free(by_head: bool, rng: random.Random) -> None:
    budget, every, size = rng.randint(20, 60), 40, rng.choice([4, 8, 16])
    world = make_world(budget=budget, every=every, recent=4, block_size=size, by_head=by_head, scorer="tova")
    cache = world.caches["it"]
    reading = world.open("it", random_text(1, 160, LAYERS))
    peak = 0
    while reading.left:
        work = reading.work(reading.chunk(rng.choice([1, 7, 160])))
        peak = max(peak, world.memory.held_bytes)
        batch = Batch([work])
        attend(batch, [(reading, len(work.tokens))])
        assert not batch.commit()
        if reading.sequence.length % every == 0:
            columns = FULL.num_kv_heads if by_head else 1
            groups = 2 if by_head else 1
            blocks = -(-min(budget, reading.sequence.length) // size)
            held = count_held_blocks(cache)
            most = groups * columns * (blocks + 1)
            assert groups * columns * (blocks - 1) <= held <= most
    assert peak <= count_bytes(cache, 160)
    reading.sequence.close()
    assert world.memory.held_bytes == 0


@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("windows", [(None, 20), (20, None)], ids=str)
def test_the_least_memory_holds_the_longest_text_and_its_queries(windows: tuple[int | None, ...], heads: int) -> None:
    layers = [LayerSpec(heads, 3 * heads, 16, 16, window=window, rotate=rotate) for window in windows]
    sizes = {"budget": 64, "every": 128, "recent": 3, "block_size": 32, "by_head": True}
    settings = StrategySettings(kind="compressed", scorer="snapkv", scorer_options={"window": 84}, **sizes)
    instances = registry.resolve_instances({"it": settings})
    geometry = Geometry(layers, torch.bfloat16, 1, 256, 256)
    least = registry.compute_least_bytes(instances, geometry, find_space("cpu").round_block)
    world = World(
        {"it": settings}, layers=layers, dtype=torch.bfloat16, max_seats=1, max_seq_len=256, memory_bytes=least
    )
    reading = world.open("it", random_text(1, 256, layers, torch.bfloat16))
    while reading.left:
        step([(reading, reading.chunk(64))])
    assert count_bytes(world.caches["it"], 256) == least


@pytest.mark.parametrize("scorer", ["keydiff", "h2o", "expected_attention"])
def test_what_a_scorer_remembers_is_reported(scorer: str, rng: random.Random) -> None:
    every, budget = 24, 48
    world = make_world(scorer=scorer, budget=budget, every=every, recent=8, scorer_options=SMALL.get(scorer, {}))
    cache, reading = world.caches["it"], world.open("it", random_text(rng.randrange(99), 120, LAYERS))
    H, Hq, D = FULL.num_kv_heads, FULL.num_q_heads, FULL.head_dim
    for length, _ in read(reading, 120, rng):
        boundary = length // every * every
        numbers = {"keydiff": 0, "h2o": H * min(boundary, budget), "expected_attention": 1 + Hq * D * (1 + D)}[scorer]
        wanted = 4 * len(LAYERS) * numbers if boundary else 0
        assert cache.usage().outside == wanted
    child = reading.sequence.fork()
    assert child is not None
    assert cache.usage().outside == wanted, "a fork shares it"
    reading.sequence.close()
    assert cache.usage().outside == wanted
    child.close()
    assert cache.usage().outside == 0


def test_a_fork_goes_on_as_its_parent(rng: random.Random) -> None:
    world = make_world(budget=20, every=16, recent=3, scorer="h2o", block_size=8)
    text, cache = random_text(1, 120, LAYERS), world.caches["it"]
    parent = world.open("it", text)
    for _ in read(parent, rng.randint(1, 90), rng):
        pass
    sequence = parent.sequence.fork()
    assert sequence is not None
    child = Reading(cache, text, sequence)
    ours, theirs = ([keys for _, keys in read(each, 120)][-1] for each in (parent, child))
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    world.check_integrity()


# ---------------------------------------------------------------- faults
class Failing:
    """Raises in one of its next calls."""

    def __init__(self) -> None:
        self.calls_left = -1  # before the call that raises; negative: none does

    def count(self) -> None:
        self.calls_left -= 1
        if self.calls_left == -1:
            raise RuntimeError("injected")


class FailingScorer(KNorm):
    """A scorer with a call that raises."""

    def __init__(self, failing: Failing) -> None:
        super().__init__(None)
        self._failing = failing

    def score(self, past: Past) -> Tensor:
        self._failing.count()
        return super().score(past)


class FailingCopies(ReferenceOps):
    """Operations with a copy of tokens that raises."""

    def __init__(self, failing: Failing) -> None:
        super().__init__()
        self._failing = failing

    def copy_tokens(self, store: KVStore, layer: int, src: Tensor, dst: Tensor) -> None:
        self._failing.count()
        super().copy_tokens(store, layer, src, dst)


@pytest.mark.parametrize("layer", range(len(LAYERS)))
@pytest.mark.parametrize("phase", ["score", "copy"])
def test_a_compaction_that_fails_in_any_layer_is_repeated_and_changes_nothing(phase: str, layer: int) -> None:
    text, found = random_text(1, 70, LAYERS), []
    for fails in (False, True):
        failing = Failing()
        ops = FailingCopies(failing if phase == "copy" else Failing())
        settings = StrategySettings(kind="compressed", scorer="knorm", budget=20, every=16, recent=3)
        world = World({"it": settings}, layers=LAYERS, ops=ops)
        cache = world.caches["it"]
        assert isinstance(cache, CompressedCache)
        cache.compactor.scorer = FailingScorer(failing if phase == "score" else Failing())
        reading = world.open("it", text)
        while reading.sequence.length < 64:
            work = reading.work(16)
            batch = Batch([work])
            attend(batch, [(reading, 16)])
            reading.sequence.commit(work.tokens)
            if fails and reading.sequence.length > 20:
                failing.calls_left = layer
                with pytest.raises(RuntimeError, match="injected"):
                    reading.sequence.compact()
            reading.sequence.compact()
            world.check_integrity()
        *_, (_, keys) = read(reading, 70)
        found.append(keys)
    for mine, theirs in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("calls", range(4))
def test_a_compaction_that_fails_as_its_books_are_kept_is_repeated(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of layers that is done when another one fails must not count its new keys twice."""
    failing, list_positions = Failing(), KeptTokens.list_positions

    def fail_at_times(kept: KeptTokens, first_new: int, end: int) -> list[Tensor]:
        failing.count()
        return list_positions(kept, first_new, end)

    monkeypatch.setattr(KeptTokens, "list_positions", fail_at_times)
    world = make_world(scorer="knorm", budget=24, every=8, recent=3, by_layer="pyramid")
    reading = world.open("it", random_text(1, 40, LAYERS))
    for _ in range(4):  # at the first boundary all keys stay
        work = reading.work(8)
        batch = Batch([work])
        attend(batch, [(reading, 8)])
        reading.sequence.commit(work.tokens)
        failing.calls_left = calls
        with suppress(RuntimeError):
            reading.sequence.compact()
        failing.calls_left = -1
        reading.sequence.compact()
        world.check_integrity()
        assert isinstance(reading.sequence, CompressedSequence)
        assert all(kept.counts == [kept.positions.shape[2]] for kept in reading.sequence.groups)
    for _ in read(reading, 40):  # which compares the keys with those of the text
        pass


@pytest.mark.parametrize("options", [{}, {"by_head": True}, {"by_layer": "pyramid"}], ids=str)
def test_a_scorer_sees_how_many_keys_will_stay(options: dict[str, Any]) -> None:
    seen: list[tuple[int, int, int]] = []

    class Noting(KNorm):
        num_queries = None  # called at every boundary

        def score(self, past: Past) -> Tensor:
            seen.append((past.layer_idx, past.positions.shape[1], past.num_kept))
            return super().score(past)

    world = make_world([FULL] * 2, scorer="knorm", budget=20, every=16, recent=3, **options)
    cache = world.caches["it"]
    assert isinstance(cache, CompressedCache)
    cache.compactor.scorer = Noting(cache.compactor.scorer.options)
    for _ in read(world.open("it", random_text(1, 48, [FULL] * 2)), 48):
        pass
    budgets = {layer: cache.layout.budgets.count_kept(layer, 48) for layer in range(2)}
    assert len(seen) == 3 * 2 * (FULL.num_kv_heads if "by_head" in options else 1)
    assert all(kept == min(budgets[layer], total) for layer, total, kept in seen)


def test_scores_of_a_wrong_shape_are_an_error_that_names_the_scorer() -> None:
    class Wrong(KNorm):
        def score(self, past: Past) -> Tensor:
            return super().score(past)[:, 1:]

    world = make_world(scorer="knorm", budget=20, every=16, recent=3)
    cache = world.caches["it"]
    assert isinstance(cache, CompressedCache)
    cache.compactor.scorer = Wrong(cache.compactor.scorer.options)
    reading = world.open("it", random_text(1, 40, LAYERS))
    step([(reading, 16)])
    with pytest.raises(ValueError, match="scorer 'knorm' returned"):
        step([(reading, 16)])


# ---------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 30}, "a budget of 30 tokens leaves nothing to choose beside 4 sinks and 32 recent tokens"),
        ({"budget": 1.5}, "a share must be above 0 and below 1"),
        ({"budget": 0}, "must be at least 1"),
        ({"budget": True}, "should be a number of tokens such as 128, or a share of the text such as 25%, not true"),
        ({"scorer": "nothing"}, "there is no scorer of keys 'nothing'"),
        (
            {"scorer": "snapkv", "every": 32},
            "^every=32: scorer .snapkv. looks at the latest 64 queries, more than there are",
        ),
        ({"scorer": "snapkv", "scorer_options": {"kernel": 3}}, r"^scorer_options.kernel .* scorer .snapkv. are: "),
    ],
)
def test_options_that_cannot_work_are_refused_in_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_world(**options)


@pytest.mark.parametrize(("options", "sinks"), [({}, 7), ({"scorer_options": {"sinks": 2}}, 2)])
def test_a_scorers_sinks_are_those_of_the_strategy_unless_it_has_its_own(options: dict[str, Any], sinks: int) -> None:
    cache = make_world(scorer="lagkv", budget=40, sinks=7, recent=3, **options).caches["it"]
    assert isinstance(cache, CompressedCache)
    assert cache.compactor.scorer.options.sinks == sinks


def test_a_start_computes_the_memory_of_the_longest_sequence() -> None:
    settings = StrategySettings(kind="compressed", budget=40, every=32, recent=4, block_size=8)
    geometry = Geometry(LAYERS, torch.float32, 2, 1000, 512)
    (instance,) = registry.resolve_instances({"it": settings})
    sizes = instance.cls.sizes(instance.options, geometry)
    assert sizes.count_blocks(1000)[0] == (40 + 32) // 8


@pytest.mark.parametrize("scorer", ["h2o", "snapkv"])
def test_a_text_that_comes_to_no_boundary_keeps_no_queries(scorer: str) -> None:
    queryless = make_world(scorer="knorm", every=1000).caches["it"]
    world = make_world(scorer=scorer, every=1000)
    cache, text = world.caches["it"], random_text(1, 160, LAYERS)
    assert [region.block_bytes for region in queryless.setup.memory.regions] == [
        region.block_bytes for region in cache.setup.memory.regions
    ]
    reading = world.open("it", text)
    for _ in read(reading, 160):
        pass
    held = world.memory.held_bytes
    assert held == count_bytes(queryless, 160) == count_bytes(cache, 160)
