"""Exact strategies agree: bit for bit given equal q, k, v or equal steps, within tolerance in other steps."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from config.settings import StrategySettings
from kernels.types import LayerSpec
from plugin_kit.driver.steps import read_through, step
from plugin_kit.driver.texts import MODEL, random_text
from tests.contract.harness import World, exact_instances
from tests.contract.toy_model import ToyModel, generate, open_requests

pytestmark = pytest.mark.every_backend

LENGTH = 140
EXACT = exact_instances()
BASELINE = "contiguous"
ROUNDED = {  # exact, but their attention is summed in another order
    "hooked": StrategySettings(kind="hooked"),
    "mirrored": StrategySettings(kind="mirrored"),
}

TOY_LAYERS = (
    LayerSpec(2, 4, 16, 16, scale=0.25),
    LayerSpec(4, 4, 8, 16, window=20, scale=0.35, softcap=8.0),
    LayerSpec(1, 6, 8, 8, scale=0.35, sink_logits=torch.linspace(-1, 1, 6)),
)
PROMPTS = [[random.Random(i).randrange(50) for _ in range(n)] for i, n in enumerate((37, 3, 90, 1, 64))]


def test_the_instances_of_this_file_say_that_they_are_exact() -> None:
    caches = World(EXACT | ROUNDED, max_seats=1).caches
    assert all(cache.contract.exact for cache in caches.values())
    assert {name for name, cache in caches.items() if not cache.contract.chunk_invariant} == {"mirrored"}


# ---------------------------------------------------------------- 1: the same q, k, v in the same rows
@pytest.mark.parametrize("chunk", [1, 7, LENGTH])
def test_attention_of_a_text_is_the_same_under_every_exact_strategy(chunk: int) -> None:
    world = World(EXACT, max_seats=1)
    text = random_text(1, LENGTH if chunk > 1 else 50, MODEL)
    outs = {name: read_through(world.open(name, text), chunk) for name in EXACT}
    for name, out in outs.items():
        assert_same(out, outs[BASELINE], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_of_a_batch_is_the_same_under_every_exact_strategy(dtype: torch.dtype) -> None:
    world = World(EXACT, dtype=dtype, max_seats=5)
    texts = [random_text(seed, 60 + 20 * seed, MODEL, dtype) for seed in range(5)]
    outs = {}
    for name in EXACT:
        readings = [world.open(name, text) for text in texts]
        schedule = random.Random(1)  # the same for every strategy
        outs[name] = []
        while unread := [r for r in readings if r.left]:
            rows = [(r, r.chunk(schedule.choice([1, 5, 33, 64]))) for r in unread]
            outs[name] += [out for row in step(rows).outs for out in row]
    for name, out in outs.items():
        assert_same(out, outs[BASELINE], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["contiguous", "paged_16", "ring"])
def test_a_row_is_the_same_whoever_stands_beside_it(name: str, dtype: torch.dtype) -> None:
    world = World({name: EXACT[name]}, dtype=dtype, max_seats=9)
    past = [3, 50, 127, 128, 129, 1, 130, 77, 20]
    texts = [random_text(seed, LENGTH, MODEL, dtype) for seed in range(len(past))]

    def last_step(members: list[int], sizes: list[int]) -> list[list[Tensor]]:
        """Enter the texts in one step up to the last tokens, then run and return a step of these row sizes."""
        readings = [world.open(name, texts[i], max_cached=0) for i in members]
        step([(reading, past[i]) for i, reading in zip(members, readings, strict=True)])
        outs = step(list(zip(readings, sizes, strict=True))).outs
        for reading in readings:
            reading.sequence.close()
        return outs

    everybody = list(range(len(past)))
    for sizes in ([1] * 9, [6, 1, 1, 9, 1, 1, 2, 1, 30]):
        together = last_step(everybody, sizes)
        for i in everybody:
            assert_same(together[i], last_step([i], [sizes[i]])[0], f"row {i}")
        for i in (2, 5):
            assert_same(together[i], last_step([0, i, 3], [4, sizes[i], 1])[1], f"row {i}")


# ---------------------------------------------------------------- 2: the same requests in the same steps
@pytest.mark.parametrize("budget", [200, 16])
def test_logits_are_the_same_when_all_requests_change_strategy(budget: int) -> None:
    wanted = logits([BASELINE] * len(PROMPTS), budget)
    for name in (each for each in EXACT if each != BASELINE):
        assert_same(logits([name] * len(PROMPTS), budget), wanted, name)


@pytest.mark.parametrize("budget", [200, 16])
def test_logits_are_the_same_when_some_requests_change_strategy(budget: int) -> None:
    wanted = logits([BASELINE] * len(PROMPTS), budget)
    for placement in (
        ["contiguous", "contiguous", "paged_16", "paged_16", "ring"],
        ["paged_7", "paged_7", "paged_7", "paged_64", "paged_64"],
        ["ring", "contiguous", "contiguous", "ring_with_sinks", "ring_with_sinks"],
    ):
        assert_same(logits(placement, budget), wanted, str(placement))


# ---------------------------------------------------------------- 3: other steps
@pytest.mark.parametrize("name", ["contiguous", "paged_16", "ring", *ROUNDED])
def test_logits_differ_by_rounding_only_under_another_schedule(name: str) -> None:
    wanted = logits([BASELINE] * len(PROMPTS), 200)
    for budget in (4, 40):
        for got, want in zip(logits([name] * len(PROMPTS), budget), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def logits(placement: list[str], budget: int) -> list[Tensor]:
    world = World({name: (EXACT | ROUNDED)[name] for name in dict.fromkeys(placement)}, layers=TOY_LAYERS)
    requests = open_requests(world.caches, placement, PROMPTS)
    return generate(ToyModel(TOY_LAYERS), requests, 12, budget)


def assert_same(got: list[Tensor], want: list[Tensor], what: str) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b), f"{what}: differs by {(a - b).abs().max()}"
