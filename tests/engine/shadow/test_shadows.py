"""Shadows change no answer, measure what brute force measures, and give way to requests that need room."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from server.engine.shadow import shadows
from server.evaluation.compare import compare
from server.evaluation.documents import Document
from server.models.no_cache import NoCacheAttention
from server.records import RequestFidelity
from tests.engine.devices import DEVICES
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, Windowed, random_prompt
from tests.engine.fake_proposer import FakeProposer

WINDOW = {"window": 20, "sinks": 2}
INSTANCES = strategies(
    window={"kind": "sliding_window", **WINDOW},
    int8={"kind": "paged", "k_dtype": "int8", "v_dtype": "int8"},
    odd_blocks={"kind": "paged", "block_size": 7},
    compressed={"kind": "compressed", "budget": 24, "every": 8, "recent": 4},
    streaming={"kind": "streaming", "window": 24, "every": 8},
)
NAMES = ["contiguous", "paged", *INSTANCES]


def start(directory: Path, **settings: Any) -> Driver:
    defaults = {"strategies": INSTANCES, "max_seq_len": 300, "kv_memory": "48MiB"}
    return Driver(directory, **(defaults | settings))


def run_one(driver: Driver, served: str, candidate: str, prompt: list[int], count: int) -> RequestFidelity:
    """Run one request alone with a shadow; return what it found."""
    driver.submit("it", prompt, count, kv_cache=served)
    driver.shadow("it", candidate)
    driver.run()
    driver.assert_nothing_leaked()
    (found,) = driver.fidelities
    return found


# ---------------------------------------------------------------- what is measured
def test_a_candidate_that_keeps_everything_agrees_everywhere(tiny: Path) -> None:
    driver = start(tiny)
    found = run_one(driver, "contiguous", "odd_blocks", random_prompt(50), 30)
    assert (found.served, found.candidate, found.rollout, found.ended_early) == ("contiguous", "odd_blocks", None, None)
    assert found.agreed == [True] * 30
    assert found.rank == [1] * 30
    assert max(found.kl) < 1e-6
    assert found.served_bytes == driver.records[0].kv_bytes
    assert found.candidate_bytes == driver.core.instances["odd_blocks"].bytes_for(80)


@pytest.mark.parametrize("batched", [512, 16], ids=["prompt in one step", "prompt in chunks of 4"])
def test_the_divergence_of_a_window_is_that_of_brute_force(tiny: Path, reference: Reference, batched: int) -> None:
    prompt, count = random_prompt(60, seed=3), 40
    driver = start(tiny, max_num_batched_tokens=batched)
    found = run_one(driver, "paged", "window", prompt, count)
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
    kl = (np.exp(exact) * (exact - windowed)).sum(-1)[first:]
    assert found.kl == pytest.approx(kl.tolist(), rel=1e-3, abs=1e-6)
    assert found.agreed == (exact.argmax(-1) == windowed.argmax(-1))[first:].tolist()
    assert not all(found.agreed)
    ranks = [1 + int((windowed[i] > windowed[i, ids[i + 1]]).sum()) for i in range(first, length)]
    assert found.rank == ranks


def with_all_logits(attention: NoCacheAttention, length: int) -> NoCacheAttention:
    attention.logit_index = torch.arange(length)
    return attention


@pytest.mark.parametrize("device", DEVICES)
def test_the_mean_divergence_is_that_of_evaluate(tiny: Path, device: str) -> None:
    """Compare the live KL with `kvmux evaluate` of the same texts: that of the whole minus that of the prompt."""
    driver = start(tiny, device=device)
    candidates = ["window", "int8", "odd_blocks"]
    prompts = [random_prompt(30 + 7 * i, seed=i) for i in range(9)]
    for i, prompt in enumerate(prompts):
        driver.submit(f"{i}", prompt, 40, kv_cache="contiguous", temperature=1.0, seed=i)
        driver.shadow(f"{i}", candidates[i % 3])
    driver.run()
    texts = [[*prompt, *driver.heard[f"{i}"].tokens] for i, prompt in enumerate(prompts)]
    for i, candidate in enumerate(candidates):
        caches = [driver.core.instances[name] for name in ("contiguous", candidate)]
        whole, beginning = (
            sum(compare(driver.core.model, caches, [Document(ids) for ids in documents[i::3]], row_tokens=1)[1].kls)
            for documents in (texts, prompts)
        )
        live = sum(sum(found.kl) for found in driver.fidelities if found.candidate == candidate)
        assert live == pytest.approx(whole - beginning, rel=0.01, abs=1e-4)


def test_the_record_of_a_request_has_the_comparison_up_to_its_end(tiny: Path) -> None:
    driver = start(tiny)
    found = run_one(driver, "paged", "window", random_prompt(60, seed=3), 20)
    (record,) = driver.records
    assert (record.shadow, record.fidelity_tokens) == ("window", 20)
    assert record.fidelity_kl == pytest.approx(sum(found.kl) / 20)
    assert record.fidelity_top1 == pytest.approx(sum(found.agreed) / 20)


# ---------------------------------------------------------------- answers stay as they are
def submit_mixed(driver: Driver, rng: random.Random, number: int, *, shadowed: bool) -> None:
    """Submit mixed requests: greedy and sampled, several choices, log-probabilities, drafts, common beginnings."""
    text = random_prompt(90)
    for i in range(number):
        prompt = [*text[: rng.choice([0, 30, 64, 90])], *random_prompt(rng.randrange(1, 60), seed=rng.randrange(99))]
        instance = rng.choice(NAMES)
        options: dict[str, Any] = {"kv_cache": instance, "temperature": rng.choice([0.0, 1.0]), "seed": i}
        options |= rng.choice([{}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"priority": rng.randrange(3)}])
        names = [f"{i}", *(f"{i}-{n}" for n in range(rng.choice([0, 0, 2])))]
        count = rng.randrange(0, 40)
        for n, name in enumerate(names):
            others = {"sibling_of": names[0], "prompt_logprobs": None} if n else {}
            driver.submit(name, prompt, count, **(options | others))
            candidate = rng.choice(NAMES)
            if shadowed:
                driver.shadow(name, candidate)


@pytest.mark.parametrize("memory", ["64MiB", "14MiB"], ids=["room", "little room"])
def test_answers_of_mixed_requests_are_equal_with_and_without_shadows(
    tiny: Path, memory: str, rng: random.Random
) -> None:
    seed, answers = rng.random(), []
    for shadowed in (False, True):
        driver = start(
            tiny, device="cpu", kv_memory=memory, deterministic=True, max_num_seqs=8, max_num_batched_tokens=64
        )
        submit_mixed(driver, random.Random(seed), 70, shadowed=shadowed)
        driver.run(20_000)
        driver.assert_nothing_leaked()
        answers.append({name: (h.tokens, h.scores, h.prompt_scores, h.failed) for name, h in driver.heard.items()})
        assert bool(driver.fidelities) == shadowed
        if shadowed:
            assert any(found.kl for found in driver.fidelities)
            assert all(found.ended_early != "failed" for found in driver.fidelities)
    assert answers[0] == answers[1]


def test_drafts_are_compared_token_by_token(tiny: Path, reference: Reference) -> None:
    prompt = random_prompt(40)
    driver = start(tiny)
    driver.submit("it", prompt, 30, kv_cache="paged")
    driver.request("it").proposer = FakeProposer([*prompt, *reference.greedy(prompt, 30)], count=3)
    driver.shadow("it", "odd_blocks")
    driver.run()
    (found,) = driver.fidelities
    assert driver.records[0].accepted_tokens > 10
    assert len(found.kl) == 30
    assert all(found.agreed)


def test_a_preempted_request_keeps_its_shadow(tiny: Path) -> None:
    driver = start(tiny)
    driver.submit("it", random_prompt(30), 30, kv_cache="paged")
    driver.shadow("it", "odd_blocks")
    for _ in range(10):
        driver.step()
    driver.preempt("it")
    driver.run()
    (found,) = driver.fidelities
    assert len(found.kl) == 30
    assert all(found.agreed)


def test_all_choices_of_a_prompt_can_be_shadowed(tiny: Path) -> None:
    driver = start(tiny)
    for n in range(3):
        options = {"sibling_of": "0"} if n else {}
        driver.submit(f"{n}", random_prompt(30), 20, kv_cache="paged", temperature=1.0, seed=n, **options)
        driver.shadow(f"{n}", "odd_blocks")
    driver.run()
    assert sorted(len(found.kl) for found in driver.fidelities) == [20] * 3
    assert all(max(found.kl) < 1e-6 for found in driver.fidelities)


def test_shadows_are_not_counted_as_work_of_requests(tiny: Path) -> None:
    plain, shadowed = start(tiny), start(tiny)
    for driver in (plain, shadowed):
        for i in range(6):
            driver.submit(f"{i}", random_prompt(40, seed=i), 20, kv_cache="paged")
            if driver is shadowed:
                driver.shadow(f"{i}", "compressed")
        driver.run()
    counts = [
        [(s.report.parts, s.report.generated_tokens, s.report.admissions, s.report.compactions) for s in driver.steps]
        for driver in (plain, shadowed)
    ]
    assert counts[0] == counts[1]
    computed = sum(step.report.shadow_tokens.get("compressed", 0) for step in shadowed.steps)
    assert computed == 6 * (40 + 20 - 1)


def test_shadows_share_prompt_blocks_with_each_other_only(tiny: Path) -> None:
    driver = start(tiny)
    prompt = random_prompt(96)
    for name in ("first", "second"):
        driver.submit(name, [*prompt, len(name)], 10, kv_cache="contiguous")
        driver.shadow(name, "paged")
        driver.run()
    computed = sum(step.report.shadow_tokens.get("paged", 0) for step in driver.steps)
    assert computed == 106 + 10, "the second one finds three blocks of 32 tokens"
    driver.submit("served", prompt, 10, kv_cache="paged")
    driver.run()
    record = driver.records[-1]
    assert (record.cached_tokens, record.miss) == (0, "cold")


# ---------------------------------------------------------------- pressure
def test_shadows_end_before_requests_are_preempted_or_wait(tiny: Path) -> None:
    preempted = []
    for shadowed in (False, True):
        driver = start(tiny, kv_memory="3MiB", max_num_seqs=16, max_seq_len=240)
        for i in range(16):
            driver.submit(f"{i}", random_prompt(30, seed=i), 200, kv_cache="paged")
            if shadowed:
                driver.shadow(f"{i}", "contiguous")
        driver.run()
        preempted.append([(name, heard.first_step, heard.last_step) for name, heard in driver.heard.items()])
    assert preempted[0] == preempted[1]
    assert any(found.ended_early == "room" for found in driver.fidelities)


def test_a_shadow_computes_at_most_a_quarter_of_a_step(tiny: Path) -> None:
    driver = start(tiny, max_num_batched_tokens=64)
    driver.submit("it", random_prompt(200), 20, kv_cache="paged")
    driver.shadow("it", "contiguous")
    driver.run()
    tokens = [sum(step.report.shadow_tokens.values()) for step in driver.steps]
    assert max(tokens) == 64 // shadows.BUDGET_SHARE
    assert all(step.report.tokens + n <= 64 for step, n in zip(driver.steps, tokens, strict=True))


def test_served_logits_that_no_memory_is_left_for_are_not_compared(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = start(tiny, max_num_batched_tokens=16)
    row = 4 * driver.core.model.info.vocab_size
    monkeypatch.setattr(shadows, "MAX_KEPT_BYTES", 3 * row)
    prompt = random_prompt(100)
    driver.submit("first", prompt, 1, kv_cache="paged")
    driver.run()
    driver.submit("it", prompt, 60, kv_cache="paged")  # finds its prompt, so that its shadow is late
    driver.shadow("it", "contiguous")
    driver.run()
    (found,) = driver.fidelities
    assert 20 < len(found.kl) < 50
    assert max(found.kl) < 1e-6


def test_a_cancelled_request_ends_its_shadow(tiny: Path) -> None:
    driver = start(tiny)
    driver.submit("it", random_prompt(30), 100, kv_cache="paged")
    driver.shadow("it", "window")
    for _ in range(20):
        driver.step()
    driver.cancel("it")
    driver.step()
    (found,) = driver.fidelities
    assert (len(found.kl), found.ended_early) == (20, None)
    driver.assert_nothing_leaked()
