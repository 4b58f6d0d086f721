"""Tests of mirrored: the history and its repeated mirror agree, and attention reads views of the mirror."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from cache_strategies import registry
from cache_strategies.base import Rows
from cache_strategies.mirrored.attention import QUERY_TILE, attend_to_mirror
from cache_strategies.mirrored.cache import MirroredCache, MirroredSequence
from cache_strategies.types import Text as CachedText
from config.errors import SettingsError
from config.settings import StrategySettings
from kernels.types import LayerSpec
from plugin_kit.driver.reference import attention, visible_keys
from plugin_kit.driver.steps import Reading, step
from plugin_kit.driver.texts import MODEL, RandomText, random_text
from tests.cache_strategies.cache_driver import (
    assert_nothing_leaked,
    count_bytes,
    make_cache,
    open_sequence,
    read_prompt,
)
from tests.contract.harness import World

MIRRORED = {"it": StrategySettings(kind="mirrored")}
DTYPES = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def mirrored_world(**how: object) -> tuple[World, MirroredCache]:
    """Return a world of one mirrored instance, whose memory is filled with NaN, and the instance."""
    world = World(MIRRORED, **how)  # type: ignore[arg-type]
    cache = world.caches["it"]
    assert isinstance(cache, MirroredCache)
    return world, cache


def sequence_of(reading: Reading) -> MirroredSequence:
    assert isinstance(reading.sequence, MirroredSequence)
    return reading.sequence


def assert_holds(sequence: MirroredSequence, text: RandomText) -> None:
    """Assert that both copies hold the first tokens of a text, compared with repeat_interleave of the text itself."""
    for layer, spec in enumerate(MODEL):
        group = spec.num_q_heads // spec.num_kv_heads
        views = zip(sequence.gather_cache_history(layer), sequence.gather_repeated_cache_history(layer), strict=True)
        for (history, mirror), part in zip(views, (text.k[layer], text.v[layer]), strict=True):
            wanted = part[: sequence.length]
            assert torch.equal(history, wanted)
            assert torch.equal(mirror, wanted.repeat_interleave(group, 1).transpose(0, 1))
            assert torch.equal(mirror[::group], history.transpose(0, 1))
            is_copy = mirror.data_ptr() != history.data_ptr()
            assert is_copy is (group > 1) or not sequence.length, "there is a mirror only where heads are grouped"


# ---------------------------------------------------------------- the two copies
@dtypes
def test_both_copies_hold_the_text_after_random_steps_and_truncations(dtype: torch.dtype, rng: random.Random) -> None:
    world, _ = mirrored_world(dtype=dtype, max_seats=3)
    readings = [world.open("it", random_text(i, 150, MODEL, dtype)) for i in range(3)]
    for _ in range(25):
        chosen = [reading for reading in readings if reading.left and rng.random() < 0.8]
        if chosen:
            step([(reading, reading.chunk(rng.choice([1, 1, 1, 5, 30]))) for reading in chosen])
        if rng.random() < 0.3:
            reading = rng.choice(readings)
            sequence_of(reading).truncate(rng.randint(0, reading.sequence.length))
            reading.text = (
                random_text(rng.randrange(100), 150, MODEL, dtype) if not reading.sequence.length else reading.text
            )
        for reading in readings:
            assert_holds(sequence_of(reading), reading.text)
        world.check_integrity()


def test_a_block_that_is_used_again_holds_the_new_text_and_zeros() -> None:
    world, _ = mirrored_world(max_seats=1)
    first, second = random_text(1, 120, MODEL), random_text(2, 40, MODEL)
    used = world.open("it", first)
    step([(used, 120)])
    sequence_of(used).close()
    again = world.open("it", second)
    assert sequence_of(again).block == sequence_of(used).block
    step([(again, 33)])
    step([(again, 1)])
    assert_holds(sequence_of(again), second)
    for layer in sequence_of(again).layers:
        for history, mirror in ((layer.k, layer.k_mirror), (layer.v, layer.v_mirror)):
            assert not history[34:].any()
            assert not mirror[:, 34:].any()


def test_a_fork_is_a_copy_of_both() -> None:
    world, _ = mirrored_world(max_seats=2)
    parent = world.open("it", random_text(1, 60, MODEL))
    step([(parent, 20)])
    child_sequence = sequence_of(parent).fork()
    assert child_sequence is not None
    child = Reading(parent.cache, parent.text, child_sequence)
    step([(parent, 1), (child, 7)])
    for reading in (parent, child):
        assert_holds(sequence_of(reading), parent.text)
    assert child_sequence.fork() is None, "both sequences are taken"


def test_histories_are_views_of_the_sequences_block() -> None:
    world, cache = mirrored_world(max_seats=2)
    readings = [world.open("it", random_text(i, 60, MODEL)) for i in range(2)]
    step([(reading, 50) for reading in readings])
    (region,) = cache.setup.memory.regions
    for sequence in map(sequence_of, readings):
        begin = region.memory.data_ptr() + sequence.block * region.page_bytes
        for layer, spec in enumerate(MODEL):
            k, v = sequence.gather_cache_history(layer)
            repeated_k, repeated_v = sequence.gather_repeated_cache_history(layer)
            assert k.shape == (50, spec.num_kv_heads, spec.head_dim)
            assert v.shape == (50, spec.num_kv_heads, spec.v_head_dim)
            assert repeated_k.shape == (spec.num_q_heads, 50, spec.head_dim)
            assert repeated_v.shape == (spec.num_q_heads, 50, spec.v_head_dim)
            grouped = spec.num_q_heads > spec.num_kv_heads
            own = (160 * spec.head_dim, spec.head_dim, 1), (spec.head_dim, k.stride(0), 1)
            assert repeated_k.stride() == own[not grouped]
            for view in (k, v, repeated_k, repeated_v):
                assert begin <= view.data_ptr() < begin + region.size
            assert sequence.gather_repeated_cache_history(layer, 7)[0].data_ptr() == repeated_k.data_ptr()


# ---------------------------------------------------------------- attention
WINDOWS = (None, 1, 9, QUERY_TILE, 200)


@dtypes
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("past", "n"), [(0, 1), (150, 1), (0, 2), (5, 3), (0, 150), (31, QUERY_TILE), (90, 65)])
def test_attention_equals_the_definition(past: int, n: int, window: int | None, dtype: torch.dtype) -> None:
    spec = LayerSpec(2, 6, 16, 8, window=window, scale=0.25, softcap=6.0, sink_logits=torch.linspace(-1, 1, 6))
    text = random_text(3, past + n, [spec], dtype)
    got = attend_at_end(text, n, spec)
    wanted = attention(text.q[0], text.k[0], text.v[0], spec, visible_keys(spec, past + n))[past:]
    assert (got.double() - wanted).abs().max() < DTYPES[dtype]


@dtypes
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("n", [1, 2, 63, 130])
def test_queries_that_do_not_see_a_broken_token_keep_their_bits(
    n: int, window: int | None, poison: float, dtype: torch.dtype
) -> None:
    spec = LayerSpec(2, 4, 16, 8, window=window, scale=0.25)
    length = 30 + n
    visible = visible_keys(spec, length)[30:]
    clean, broken = (random_text(4, length, [spec], dtype) for _ in range(2))
    bad = [12, 30 + n // 2, length - 1]
    for part in (broken.q, broken.k, broken.v):
        part[0][bad] = poison
    before, after = attend_at_end(clean, n, spec), attend_at_end(broken, n, spec)
    unaware = ~visible[:, bad].any(1)
    assert torch.equal(before[unaware], after[unaware])
    assert not after[~unaware].isfinite().flatten(1).all(1).any(), "what is seen is not hidden"


def attend_at_end(text: RandomText, n: int, spec: LayerSpec) -> Tensor:
    """Return the attention of the last n tokens of a text of one layer, over a mirror with unused columns."""
    group = spec.num_q_heads // spec.num_kv_heads
    mirrors = []
    for part in (text.k[0], text.v[0]):
        mirror = torch.full((spec.num_q_heads, len(text) + 9, part.shape[2]), torch.nan, dtype=part.dtype)
        mirror[:, : len(text)] = part.repeat_interleave(group, 1).transpose(0, 1)
        mirrors.append(mirror[:, : len(text)])
    out = torch.empty(n, spec.num_q_heads, spec.v_head_dim, dtype=part.dtype)
    attend_to_mirror(out, text.q[0][-n:], mirrors[0], mirrors[1], spec)
    return out


@dtypes
def test_a_row_has_the_same_bits_beside_other_rows(dtype: torch.dtype) -> None:
    texts = [random_text(i, 100, MODEL, dtype) for i in range(4)]

    def last_step(members: list[int], sizes: list[int]) -> list[list[Tensor]]:
        world, _ = mirrored_world(dtype=dtype, max_seats=4)
        readings = [world.open("it", texts[i]) for i in members]
        step([(reading, 40 + 3 * i) for i, reading in zip(members, readings, strict=True)])
        return step(list(zip(readings, sizes, strict=True))).outs

    for sizes in ([1, 1, 1, 1], [5, 1, 1, 30]):
        together = last_step([0, 1, 2, 3], sizes)
        for i, out in enumerate(together):
            for a, b in zip(out, last_step([i], [sizes[i]])[0], strict=True):
                assert torch.equal(a, b)


def test_it_agrees_with_contiguous_within_rounding_and_says_that_bits_depend_on_rows() -> None:
    text = random_text(1, 100, MODEL)
    outs = {}
    for kind in ("contiguous", "mirrored"):
        world = World({"it": StrategySettings(kind=kind)}, max_seats=1)
        reading = world.open("it", text)
        parts = [step([(reading, n)]).outs[0] for n in (70, 1, 1, 28)]
        outs[kind] = [torch.cat(layer) for layer in zip(*parts, strict=True)]
    for ours, theirs in zip(outs["mirrored"], outs["contiguous"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    reading.sequence.close()
    again = world.open("it", text).sequence
    assert (again.found, again.miss) == (0, "bypass"), "nothing of a closed sequence is reused"
    contract = world.caches["it"].contract
    assert contract.exact
    assert contract.rewind is None
    assert not contract.chunk_invariant


@dtypes
@pytest.mark.parametrize("kv_heads", [2, 16])
def test_decode_copies_no_history(kv_heads: int, dtype: torch.dtype) -> None:
    """All that torch allocates at a time in a decode step is smaller than the head-major keys of one tensor."""
    spec = LayerSpec(kv_heads, 16, 128, 128, scale=0.125)
    world, cache = mirrored_world(layers=[spec], dtype=dtype, max_seats=1, max_seq_len=700, max_num_batched_tokens=700)
    reading = world.open("it", random_text(1, 600, [spec], dtype))
    step([(reading, 598)])
    step([(reading, 1)])
    rows = Rows([sequence_of(reading)], [1])
    cache.locate(rows)
    q, k, v = (part[0][599:] for part in (reading.text.q, reading.text.k, reading.text.v))
    out = torch.empty_like(q)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        cache.attend(0, rows, q, k, v, out)
    allocated = highest = 0
    for event in trace.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            allocated += event.nbytes()
            highest = max(highest, allocated)
    mirror = sequence_of(reading).gather_repeated_cache_history(0, 600)[0]
    assert 0 < highest < mirror.nelement() * mirror.itemsize // 2


# ---------------------------------------------------------------- what is refused
def test_append_refuses_other_shapes_and_writes_nothing() -> None:
    for heads in (2, 6):  # with a mirror, and without one
        spec = LayerSpec(heads, 6, 8, 4)
        world, cache = mirrored_world(layers=[spec], max_seats=1, max_seq_len=40, max_num_batched_tokens=40)
        sequence = cache.open(CachedText([1]))
        assert sequence is not None
        cache.locate(Rows([sequence], [3]))
        k, v = torch.ones(3, heads, 8), torch.ones(3, heads, 4)
        (memory,) = world.list_tensors()
        before = memory.clone()
        for keys, values, words in (
            (k[:, :1], v, "k must be"),
            (k, v[:, :1], "v must be"),
            (k[..., :1], v, "k must be"),
            (k, v[..., :1], "v must be"),
            (k[:1], v, "v must be"),
            (k, v[:1], "v must be"),
            (k[0], v[0], "k must be"),
            (k.half(), v, "v must be"),
            (k.half(), v.half(), "must be torch.float32"),
            (torch.ones(41, heads, 8), torch.ones(41, heads, 4), "room for 40 tokens, not for 41"),
        ):
            with pytest.raises(ValueError, match=words):
                sequence.append(0, keys, values, cache.setup)
            assert torch.equal(memory, before)
        sequence.append(0, k, v, cache.setup)
        assert sequence.gather_cache_history(0, 3)[0].eq(1).all()


# ---------------------------------------------------------------- memory
def test_without_grouped_heads_a_sequence_takes_as_much_as_under_contiguous() -> None:
    settings = {kind: StrategySettings(kind=kind) for kind in ("contiguous", "mirrored")}
    layers = [LayerSpec(4, 4, 64, 64)] * 3
    world = World(settings, layers=layers, max_seats=1, max_seq_len=160)
    plain, mirrored = world.caches["contiguous"], world.caches["mirrored"]
    assert isinstance(mirrored, MirroredCache)
    assert count_bytes(mirrored, 160) == count_bytes(plain, 160)
    assert world.get_sizes("mirrored").block_bytes == [160 * 3 * 2 * 64 * 4 * 4]
    text = random_text(1, 90, layers)
    readings = [world.open(kind, text) for kind in settings]
    for n in (70, 1, 19):
        theirs, ours = step([(reading, n) for reading in readings]).outs
        for a, b in zip(theirs, ours, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
    usage = mirrored.usage()
    assert (usage.tokens, usage.used) == (90, 90 * 3 * 2 * 64 * 4 * 4)


def test_sizes_count_both_copies() -> None:
    settings = {kind: StrategySettings(kind=kind) for kind in ("contiguous", "mirrored")}
    layers = [LayerSpec(2, 14, 64, 64)] * 3
    world = World(settings, layers=layers, dtype=torch.bfloat16, max_seats=1, max_seq_len=160)
    plain, mirrored = world.caches["contiguous"], world.caches["mirrored"]
    assert isinstance(mirrored, MirroredCache)
    assert count_bytes(mirrored, 1) == count_bytes(mirrored, 160) == 8 * count_bytes(plain, 160)
    assert world.get_sizes("mirrored").block_bytes == [3 * 2 * 160 * 64 * (2 + 14) * 2]
    reading = world.open("mirrored", random_text(1, 30, layers, torch.bfloat16))
    step([(reading, 30)])
    usage = mirrored.usage()
    assert usage[:2] == (1, 30)
    assert usage.used == 30 * 3 * 2 * 64 * (2 + 14) * 2
    assert usage.reserved == usage.used + usage.wasted == count_bytes(mirrored, 30)
    assert world.memory.held_bytes == usage.reserved
    assert mirrored.blocks().in_use == 1


def test_without_room_there_is_no_sequence_until_one_closes() -> None:
    for limits in ({"blocks": 2}, {"seats": 2}):
        cache = make_cache("mirrored", **limits)
        first, _ = open_sequence(cache, [1]), open_sequence(cache, [2])
        assert cache.open(CachedText([1])) is None
        assert first.fork() is None
        first.close()
        assert cache.open(CachedText([1])) is not None
        cache.check_integrity()


def test_closing_everything_frees_everything() -> None:
    cache = make_cache("mirrored", seats=4)
    sequences = [read_prompt(cache, [n] * n) for n in (1, 5, 7)]
    child = sequences[1].fork()
    assert child is not None
    for sequence in (sequences[2], sequences[0], child, sequences[1]):
        sequence.close()
        cache.check_integrity()
    assert_nothing_leaked(cache)


def test_books_that_do_not_add_up_are_noticed() -> None:
    for spoil in (
        lambda cache, sequences: cache.setup.memory.regions[0].allocate(),
        lambda cache, sequences: setattr(sequences[0], "block", sequences[1].block),
        lambda cache, sequences: setattr(sequences[0], "length", 65),
    ):
        cache = make_cache("mirrored")
        sequences = [read_prompt(cache, [n]) for n in range(2)]
        cache.check_integrity()
        spoil(cache, sequences)
        with pytest.raises(AssertionError):
            cache.check_integrity()


def test_it_keeps_floats_only() -> None:
    with pytest.raises(SettingsError, match=r"strategies\.it\.k_dtype is not an option of this kind"):
        registry.resolve_instances({"it": StrategySettings(kind="mirrored", k_dtype="int8", v_dtype="int8")})
