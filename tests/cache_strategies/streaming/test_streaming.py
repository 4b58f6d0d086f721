"""What `streaming` keeps, rotates, frees and refuses: against the definition in float64, and for very long texts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_strategies import registry
from cache_strategies.streaming.cache import StreamingSequence
from cache_strategies.streaming.options import KeptSizes, StreamingOptions
from cache_strategies.types import Geometry
from cache_strategies.visible import count_dropped_tokens
from config.errors import SettingsError
from config.settings import StrategySettings
from kernels.reference.backend import ReferenceOps
from kernels.store import KVStore
from kernels.types import LayerSpec
from plugin_kit.driver.reference import attention
from plugin_kit.driver.steps import Keys, Reading, attend, step
from plugin_kit.driver.texts import RandomText, random_text, rotate
from plugin_kit.driver.visible import check_keys
from server.engine.batch import Batch
from tests.cache_strategies.cache_driver import count_bytes
from tests.contract.harness import World
from tests.contract.rotary import Streaming

FULL = LayerSpec(2, 6, 16, 8, scale=0.25, rotate=rotate)
LAYERS = (FULL, FULL._replace(num_kv_heads=1), FULL._replace(window=14), FULL._replace(window=45))


def make_world(
    layers: Sequence[LayerSpec] = LAYERS,
    *,
    max_seq_len: int = 160,
    dtype: torch.dtype = torch.float32,
    ops: ReferenceOps | None = None,
    **options: Any,
) -> World:
    settings = {"it": StrategySettings(kind="streaming", **options)}
    return World(settings, layers=layers, max_seats=2, max_seq_len=max_seq_len, dtype=dtype, ops=ops)


def read(reading: Reading, end: int, rng: random.Random | None = None) -> list[Keys]:
    """Read a text up to a position, in random rows; return the keys of the last row."""
    keys: list[Keys] = []
    while reading.sequence.length < end:
        wanted = min(end - reading.sequence.length, 1000 if rng is None else rng.choice([1, 2, 7, 30]))
        keys = step([(reading, reading.chunk(wanted))], keys=True).keys[0]
    return keys


def assert_same(ours: Sequence[Keys], theirs: Sequence[Keys]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


# ---------------------------------------------------------------- keys and positions
def check_last_step(reading: Reading, definition: Streaming, tolerance: float) -> float:
    """Read one more token; compare the keys that it sees, and attention over them, with the definition in float64.

    Return the largest error of a key, in units of its norm.
    """
    start, end, worst = reading.sequence.length, reading.sequence.length + 1, 0.0
    assert reading.sequence.shift == int(definition.count_dropped(torch.tensor([start])))
    found = step([(reading, 1)], keys=True)
    for layer, spec in enumerate(reading.cache.setup.geometry.layers):
        q, k, v = (part[layer][:end] for part in (reading.text.q, reading.text.k, reading.text.v))
        q, k = definition.place(q[start:], k, start)
        norm = float(k.norm(dim=2).max())
        keys, _, positions = found.keys[0][layer]
        error = (keys.double() - k[positions[:, 0]]).norm(dim=2).max() / norm
        worst = max(worst, float(error))
        listed = check_keys(k, v, found.keys[0][layer], rounding=tolerance)
        mask = definition.visible_keys(spec, start, end)
        assert torch.equal(listed, mask[-1].expand_as(listed))
        want = attention(q, k, v, spec, mask)
        assert (found.outs[0][layer].double() - want).abs().max() < 20 * tolerance
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_keys_rotated_at_many_boundaries_are_those_rotated_once(dtype: torch.dtype, rng: random.Random) -> None:
    sizes = Streaming(rng.randint(0, 5), rng.randint(1, 60), rng.randint(1, 40))
    print(sizes)
    world = make_world(dtype=dtype, **sizes._asdict())
    reading = world.open("it", random_text(rng.randrange(99), 501, LAYERS, dtype))
    tolerance = sizes.count_rotations() * torch.finfo(dtype).eps
    for end in sorted(rng.sample(range(1, 500), 5)):
        read(reading, max(end, reading.sequence.length), rng)
        check_last_step(reading, sizes, tolerance)
        world.check_integrity()


def test_keys_of_int8_are_rounded_at_each_boundary_only(rng: random.Random) -> None:
    sizes = Streaming(4, 48, 12)
    layers = [FULL, FULL._replace(window=30)]
    world = make_world(layers, k_dtype="int8", v_dtype="int8", block_size=8, **sizes._asdict())
    reading = world.open("it", random_text(rng.randrange(99), 401, layers))
    start = 400
    read(reading, start, rng)
    keys = step([(reading, 1)], keys=True).keys[0]
    for layer, (k, v, positions) in enumerate(keys):
        _, placed = sizes.place(reading.text.q[layer][start:], reading.text.k[layer], start)
        wanted, largest = placed[positions[:, 0]], placed.abs().max()
        assert (k.double() - wanted).abs().max() < sizes.count_rotations() * largest / 127
        assert (v - reading.text.v[layer][positions[:, 0]]).abs().max() < v.abs().max() / 127


def test_sinks_are_never_rotated_and_values_stay_bit_for_bit(rng: random.Random) -> None:
    sinks = rng.randint(1, 6)
    world = make_world(sinks=sinks, window=20, every=7, dtype=torch.bfloat16)
    reading = world.open("it", random_text(1, 250, LAYERS, torch.bfloat16))
    keys = read(reading, 250, rng)
    for layer, (k, v, positions) in enumerate(keys[:2]):
        assert positions[:sinks, 0].tolist() == list(range(sinks))
        assert torch.equal(k[:sinks], reading.text.k[layer][:sinks])
        assert torch.equal(v, reading.text.v[layer][positions[:, 0]])


def test_what_stays_does_not_depend_on_how_a_text_is_cut(rng: random.Random) -> None:
    options = {"sinks": rng.randint(0, 4), "window": rng.randint(1, 50), "every": rng.randint(1, 30)}
    print(options)
    text = random_text(1, 150, LAYERS)
    found = [read(make_world(**options).open("it", text), 150, cut) for cut in (None, rng, rng)]
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


def test_a_fork_goes_on_as_its_parent(rng: random.Random) -> None:
    world = make_world(sinks=3, window=20, every=9, block_size=8)
    cache, parent = world.caches["it"], world.open("it", random_text(1, 150, LAYERS))
    read(parent, rng.randint(1, 120), rng)
    sequence = parent.sequence.fork()
    assert sequence is not None
    child = Reading(cache, parent.text, sequence)
    assert sequence.shift == parent.sequence.shift
    assert_same(read(parent, 150, rng), read(child, 150, rng))
    world.check_integrity()


# ---------------------------------------------------------------- memory
def repeated(text: RandomText, times: int) -> RandomText:
    """Return a text whose tokens repeat those of another."""
    return RandomText(text.ids * times, *([x.repeat(times, 1, 1) for x in part] for part in (text.q, text.k, text.v)))


def test_a_text_of_three_thousand_tokens_takes_constant_memory_and_few_positions(rng: random.Random) -> None:
    sizes = Streaming(4, 100, 50)
    layers = [FULL, FULL._replace(window=30)]
    world = make_world(layers, block_size=16, **sizes._asdict())
    cache = world.caches["it"]
    reading = world.open("it", repeated(random_text(1, 1000, layers), 4))
    held: list[int] = []
    while reading.sequence.length < 3000:
        step([(reading, reading.chunk(rng.choice([50, 50, 50, 13])))])
        assert reading.sequence.length - reading.sequence.shift <= 104 + 50
        held.append(world.memory.held_bytes)
    assert max(held) <= count_bytes(cache, 3000) == count_bytes(cache, 200)
    assert isinstance(reading.sequence, StreamingSequence)
    assert [kept.counts for kept in reading.sequence.groups] == [[104], [29]], (
        "a narrow window of the model's own is all"
    )
    dropped = count_dropped_tokens(cache, reading.sequence.length)
    assert dropped == reading.sequence.shift * 2 // 4  # the model's own window lacks nothing
    check_last_step(reading, sizes, 5e-6)
    world.check_integrity()
    reading.sequence.close()
    assert world.memory.held_bytes == 0


def test_a_start_computes_the_memory_of_the_longest_sequence() -> None:
    settings = StrategySettings(kind="streaming", sinks=4, window=60, every=32, block_size=8)
    geometry = Geometry([FULL], torch.float32, 2, 1000, 512)
    (instance,) = registry.resolve_instances({"it": settings})
    assert [*instance.cls.sizes(instance.options, geometry).count_blocks(1000)] == [(4 + 60 + 32) // 8]


# ---------------------------------------------------------------- faults
class Failing(ReferenceOps):
    """Operations and stores of which one call fails."""

    def __init__(self) -> None:
        super().__init__()
        self.calls_left = -1  # before the call that raises; negative: none does

    def count(self) -> None:
        self.calls_left -= 1
        if self.calls_left == -1:
            raise RuntimeError("injected")

    def copy_tokens(self, store: KVStore, layer: int, src: Tensor, dst: Tensor) -> None:
        self.count()
        super().copy_tokens(store, layer, src, dst)


def compact_at_boundaries(
    reading: Reading, end: int, every: int, failing: Failing, calls: int | None
) -> Iterator[bool]:
    """Read a text in rows that end at boundaries; yield whether the first try of each compaction failed."""
    while reading.sequence.length < end:
        work = reading.work(every)
        batch = Batch([work])
        attend(batch, [(reading, every)])
        reading.sequence.commit(work.tokens)
        failing.calls_left = -1 if calls is None else calls
        try:
            reading.sequence.compact()
            yield False
        except RuntimeError:
            reading.sequence.compact()
            yield True
        failing.calls_left = -1


def test_a_compaction_that_fails_anywhere_is_repeated_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that fails is the next one each time: of `rotate`, of the copy, or of the store's planes."""
    failing, planes = Failing(), KVStore.planes

    def count_planes(store: KVStore, layer: int) -> Any:
        failing.count()
        return planes(store, layer)

    def count_rotations(x: Tensor, delta: Tensor) -> Tensor:
        failing.count()
        return rotate(x, delta)

    layers = [spec._replace(rotate=count_rotations) for spec in LAYERS]
    monkeypatch.setattr(KVStore, "planes", count_planes)
    text, found = random_text(1, 58, layers), []
    for calls in (None, *range(200)):
        world = make_world(layers, ops=failing, sinks=2, window=20, every=16)
        reading = world.open("it", text)
        failed = list(compact_at_boundaries(reading, 48, 16, failing, calls))
        world.check_integrity()
        found.append(read(reading, 58))
        assert_same(found[0], found[-1])
        if calls is not None and not any(failed):
            break
    assert calls is not None
    assert calls > 4 * len(layers), "each layer has calls that can fail"


# ---------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, r"strategies\.it\.window: should be 1 or more"),
        ({"every": 0}, r"strategies\.it\.every: should be 1 or more"),
        ({"sinks": -1}, r"strategies\.it\.sinks: "),
        ({"budget": 9}, r"strategies\.it\.budget is not an option of this kind"),
        (
            {"window": 150, "every": 10},
            "sinks=4, window=150 and every=10 take 164 positions, more than max_seq_len=160",
        ),
        ({"window": 160}, "sinks=4, window=160 and every=1 take 165 positions"),
        ({"sinks": 160}, "sinks=160, window=1 and every=1 take 162 positions"),
    ],
)
def test_options_that_cannot_work_are_refused_in_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_world(**options)


def test_layers_that_cannot_rotate_are_refused_in_a_sentence() -> None:
    with pytest.raises(
        SettingsError, match=r"rotates keys .* not possible in layers 1, 2 of 3: .*such as sliding_window"
    ):
        make_world([FULL, FULL._replace(rotate=None), FULL._replace(rotate=None)])


@pytest.mark.parametrize("_", range(20))
def test_defaults_fit_any_model(_: int, rng: random.Random) -> None:
    max_seq_len = rng.choice([rng.randint(12, 100), rng.randint(100, 10_000)])
    given = {
        name: rng.randint(1, max(1, max_seq_len // 4)) for name in ("sinks", "window", "every") if rng.random() < 0.4
    }
    print(max_seq_len, given)
    sizes = KeptSizes.resolve(StreamingOptions(**given), max_seq_len)
    sizes.check("it", max_seq_len)
    assert min(sizes.window, sizes.every) >= 1
    assert given.items() <= sizes._asdict().items()


def test_the_defaults_of_a_model_with_a_long_context() -> None:
    assert KeptSizes.resolve(StreamingOptions(), 8192) == (4, 1024, 256)
    assert KeptSizes.resolve(StreamingOptions(), 512) == (4, 256, 64)


def test_it_promises_texts_without_an_end_and_no_exactness() -> None:
    contract = make_world(window=100).caches["it"].contract
    assert contract.unbounded
    assert contract.replayable
    assert contract.chunk_invariant
    assert not contract.exact
    assert isinstance(make_world().open("it", random_text(1, 5, LAYERS)).sequence, StreamingSequence)
