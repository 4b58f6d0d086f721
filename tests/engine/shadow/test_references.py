"""A request with a reference gets the divergence of each of its tokens from that instance, and nothing else changes."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from config.settings import Settings
from server.engine.build import build_engine
from server.engine.ipc.messages import Compared, SamplingParams, Submit
from server.engine.isolation.quarantine import FIRST_SECONDS
from server.engine.shadow import shadows
from server.engine.shadow.shadows import MAX_IDLE_STEPS
from server.models.no_cache import NoCacheAttention
from tests.engine.engine_driver import Driver, RequestEvents
from tests.engine.expected_tokens import Reference, Windowed, random_prompt
from tests.engine.fallback_driver import heal, make_driver, quarantine
from tests.engine.shadow.test_shadows import NAMES, WINDOW, start, with_all_logits


def compare_one(driver: Driver, served: str, reference: str, prompt: list[int], count: int, **options: Any) -> Compared:
    """Run one request alone with a reference; return all that was compared."""
    heard = driver.submit("it", prompt, count, kv_cache=served, reference=reference, **options)
    driver.run()
    driver.assert_nothing_leaked()
    return merge(heard)


def merge(heard: RequestEvents) -> Compared:
    """Return the comparison of all events, the last of which must say that it is."""
    assert [each.is_last for each in heard.compared] == [False] * (len(heard.compared) - 1) + [True]
    columns = (
        [value for each in heard.compared for value in getattr(each, name)]
        for name in ("indexes", "kl", "agreed", "rank")
    )
    return Compared("it", *columns, ended_early=heard.compared[-1].ended_early)


@pytest.mark.parametrize("batched", [512, 16], ids=["prompt in one step", "prompt in chunks of 4"])
def test_tokens_of_a_window_are_compared_as_by_brute_force(tiny: Path, reference: Reference, batched: int) -> None:
    prompt, count = random_prompt(60, seed=3), 40
    driver = start(tiny, max_num_batched_tokens=batched)
    found = compare_one(driver, "window", "paged", prompt, count)
    ids = [*prompt, *driver.heard["it"].tokens]
    model, length = reference.model, len(ids) - 1
    exact, windowed = (
        reference._logits(ids[:-1], with_all_logits(attention, length)).double().log_softmax(-1).numpy()
        for attention in (
            NoCacheAttention(model.layer_specs, length, model.device),
            Windowed(model.layer_specs, length, **WINDOW),
        )
    )
    first = len(prompt) - 1
    assert found.indexes == [*range(count)]
    assert found.kl == pytest.approx((np.exp(exact) * (exact - windowed)).sum(-1)[first:].tolist(), rel=1e-3, abs=1e-6)
    assert found.agreed == (exact.argmax(-1) == windowed.argmax(-1))[first:].tolist()
    assert not all(found.agreed)
    assert found.rank == [1 + int((exact[i] > exact[i, ids[i + 1]]).sum()) for i in range(first, length)]


def test_an_equal_instance_agrees_at_every_token(tiny: Path) -> None:
    found = compare_one(start(tiny), "odd_blocks", "contiguous", random_prompt(50), 30, temperature=1.0, seed=7)
    assert found.agreed == [True] * 30
    assert max(found.kl) < 1e-6


@pytest.mark.parametrize(
    ("count", "options"), [(8, {"reference": "paged"}), (0, {"reference": "window"})], ids=["the same", "no tokens"]
)
def test_without_anything_to_compare_there_is_only_the_last_event(tiny: Path, count: int, options: Any) -> None:
    driver = start(tiny)
    heard = driver.submit("it", random_prompt(20), count, kv_cache="paged", **options)
    driver.run()
    assert heard.compared == [Compared("it", is_last=True)]
    assert len(heard.tokens) == count


def test_an_unknown_reference_is_refused(tiny: Path) -> None:
    heard = start(tiny).submit("it", random_prompt(20), 8, reference="nowhere")
    assert heard.failed is not None
    assert (heard.failed.status, heard.failed.code, heard.failed.param) == (
        400,
        "unknown_kv_cache",
        "kv_cache_reference",
    )
    assert "paged" in heard.failed.message


def test_results_come_while_the_text_is_generated(tiny: Path) -> None:
    driver = start(tiny)
    heard = driver.submit("it", random_prompt(30), 40, kv_cache="window", reference="paged")
    while len(heard.tokens) < 20:
        driver.step()
    assert sum(len(each.indexes) for each in heard.compared) >= 12


def test_a_comparison_counts_for_no_candidate(tiny: Path) -> None:
    driver = start(tiny)
    compare_one(driver, "window", "paged", random_prompt(60, seed=3), 20)
    assert not driver.fidelities
    (record,) = driver.records
    assert (record.instance, record.shadow, record.fidelity_tokens) == ("window", "paged", 20)


def test_comparisons_give_way_to_requests_and_say_so(tiny: Path) -> None:
    driver = start(tiny, kv_memory="2MiB")
    options = {"kv_cache": "contiguous", "reference": "paged"}
    heard = [driver.submit(f"{i}", random_prompt(200, seed=i), 60, **options) for i in range(20)]
    driver.run()
    driver.assert_nothing_leaked()
    assert "room" in {merge(each).ended_early for each in heard}
    assert {each.finish_reason for each in heard} == {"length"}


def test_a_comparison_without_rows_waits_for_the_end_of_the_text(tiny: Path) -> None:
    driver = start(tiny, max_num_seqs=1)  # the served request takes the only row of each step
    heard = driver.submit("it", random_prompt(30), 200, kv_cache="window", reference="paged")
    while not heard.ended:
        driver.step()
    assert not heard.compared
    driver.run()
    driver.assert_nothing_leaked()
    assert merge(heard).indexes == [*range(200)]


def test_a_client_does_not_wait_for_ever_for_a_comparison_without_rows(tiny: Path) -> None:
    driver = start(tiny, max_num_seqs=1)
    heard = driver.submit("it", random_prompt(30), 20, kv_cache="window", reference="paged")
    for i in range(3):
        driver.submit(f"{i}", random_prompt(30, seed=i), 200)
    while not heard.ended:
        driver.step()
    for _ in range(MAX_IDLE_STEPS + 1):
        driver.step()
    assert heard.compared == [Compared("it", is_last=True, ended_early="room")]
    driver.run()
    driver.assert_nothing_leaked()


def test_a_client_does_not_wait_long_for_a_comparison_without_rows(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = start(tiny, max_num_seqs=1)
    heard = driver.submit("it", random_prompt(30), 20, kv_cache="window", reference="paged")
    driver.submit("other", random_prompt(30, seed=1), 200)
    while not heard.ended:
        driver.step()
    monkeypatch.setattr(shadows, "MAX_WAIT", 0.05)
    time.sleep(0.1)
    driver.step()
    assert heard.compared == [Compared("it", is_last=True, ended_early="room")]
    driver.run()
    driver.assert_nothing_leaked()


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_shadow_that_lags_far_behind_is_waited_for(
    tiny: Path, is_awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadows, "MAX_WAIT", 0.3)
    driver = start(tiny, max_num_batched_tokens=64)
    options = {"reference": "paged"} if is_awaited else {}
    heard = driver.submit("it", random_prompt(200), 2, kv_cache="window", **options)
    if not is_awaited:
        driver.shadow("it", "paged")
    while not heard.ended:
        driver.step()
    while driver.core.busy:
        time.sleep(0.05 if is_awaited else 0.35)
        driver.step()
    driver.assert_nothing_leaked()
    assert (merge(heard).indexes if is_awaited else [*range(len(driver.fidelities[0].kl))]) == [0, 1]


@pytest.mark.parametrize("count", [1, 12])
def test_every_token_of_all_choices_is_compared(tiny: Path, count: int) -> None:
    driver = start(tiny)
    prompt = random_prompt(40)
    heard = [
        driver.submit(f"{i}", prompt, count, kv_cache="window", reference="paged", sibling_of="0" if i else None)
        for i in range(3)
    ]
    driver.run()
    driver.assert_nothing_leaked()
    assert [merge(each).indexes for each in heard] == [[*range(count)]] * 3
    assert merge(heard[1]).kl == pytest.approx(merge(heard[0]).kl, abs=1e-6), "the same greedy text"


@pytest.mark.parametrize("outcome", ["cancelled", "stop", "error"])
def test_a_request_that_is_ended_from_outside_gets_its_last_event(tiny: Path, outcome: str) -> None:
    driver = start(tiny)
    heard = driver.submit("it", random_prompt(30), 200, kv_cache="window", reference="paged")
    while len(heard.tokens) < 9:
        driver.step()
    driver.cancel("it", outcome)
    driver.run()
    driver.step()
    driver.assert_nothing_leaked()
    assert len(merge(heard).indexes) >= (9 if outcome == "stop" else 4)


def test_random_requests_have_the_same_texts_with_references(tiny: Path, rng: random.Random) -> None:
    """Mixed requests, several choices, little memory: each text is as without references, each comparison ends once."""
    drivers = [start(tiny, kv_memory="20MiB") for _ in range(2)]
    for i in range(40):
        prompt = random_prompt(rng.randrange(1, 150), seed=rng.randrange(20))
        options = {"kv_cache": rng.choice(NAMES), "temperature": rng.choice([0.0, 1.0]), "seed": i}
        count, reference = rng.randrange(0, 40), rng.choice([None, *NAMES])
        for n in range(rng.choice([1, 1, 2])):
            others = {"sibling_of": f"{i}-0"} if n else {}
            drivers[0].submit(f"{i}-{n}", prompt, count, **options, **others)
            drivers[1].submit(f"{i}-{n}", prompt, count, **options, **others, reference=reference)
    for driver in drivers:
        driver.run()
        driver.step()
        driver.assert_nothing_leaked()
    for name, heard in drivers[1].heard.items():
        assert heard.tokens == drivers[0].heard[name].tokens, name
        if heard.compared:
            found = merge(heard)
            assert found.indexes == sorted(set(found.indexes))
            assert not found.indexes or found.indexes[-1] < len(heard.tokens)
            assert all(torch.tensor(found.kl).isfinite())
    assert any(heard.compared for heard in drivers[1].heard.values())


def test_a_reference_that_is_tried_after_a_quarantine_compares_nothing(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(tiny, "locate raises")
    quarantine(driver)
    heal(monkeypatch, "locate raises")
    driver.now += FIRST_SECONDS
    trial = driver.submit("trial", random_prompt(20), 30)
    driver.step()
    assert driver.running() == ["trial"]
    heard = driver.submit("it", random_prompt(20), 3, kv_cache="good", reference="bad")
    driver.run()
    assert trial.failed is None
    assert heard.failed is None
    assert [(each.is_last, each.ended_early) for each in heard.compared] == [(True, "failed")]


def test_a_disabled_reference_compares_nothing(tiny: Path) -> None:
    given = {"paged": {"kind": "paged"}, "contiguous": {"kind": "contiguous"}}
    settings = Settings(model=str(tiny), strategies=given, weights_cache="off", threads=1, kv_memory="4MiB")
    core = build_engine(settings, disabled={"contiguous": "open() did not return"}).core
    sampling = SamplingParams(2, temperature=0.0, ignore_eos=True)
    assert core.submit(0, Submit("it", [5, 6], sampling, reference="contiguous")) is None
    events = []
    while core.busy:
        events += [event.message for event in core.step().events]
    assert Compared("it", is_last=True, ended_early="failed") in events
