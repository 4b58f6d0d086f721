"""A request that makes a step fail ends with an error; other requests are answered as without it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.ops import Attention
from server.engine.ipc.messages import Speculation
from server.engine.model_runner import ModelRunner
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt
from tests.engine.test_step_recovery import ALWAYS, INSTANCES, break_locate

SETTINGS: dict[str, Any] = {
    "strategies": strategies(paged={"kind": "paged", "block_size": 8}, mirrored={"kind": "mirrored"}),
    "max_seq_len": 96,
    "max_num_batched_tokens": 80,
}
DETERMINISTIC = SETTINGS | {"strategies": strategies(paged={"kind": "paged", "block_size": 8}), "deterministic": True}
COUNT = 8
NO_SUCH_TOKEN = 2**31 - 1  # the API refuses it; in the engine it stands for any fault of one request's own

Fails = Callable[[list[int]], bool]


class FailingModel:
    """A model that raises when the token ids of a step satisfy `fails`."""

    def __init__(self, model: Any, fails: Fails) -> None:
        self._model = model
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        if self._fails(ids.tolist()):
            raise IndexError("broken on purpose")
        return self._model.forward(ids, attention)


def make_fail(driver: Driver, fails: Fails) -> None:
    core = driver.core
    core.model = FailingModel(core.model, fails)  # type: ignore[assignment]
    core.runner = ModelRunner(core.model, core.runner._sampler)


def submit_six(driver: Driver, **options: Any) -> None:
    """Submit two requests under each strategy; those of one strategy have a common prefix."""
    for i, instance in enumerate(INSTANCES * 2):
        driver.submit(f"{instance} {i}", random_prompt(25, seed=i % 3), COUNT, kv_cache=instance, **options)


def assert_others_are_right(driver: Driver, reference: Reference) -> None:
    for name, heard in driver.heard.items():
        if name != "bad":
            assert heard.failed is None, name
            assert heard.tokens == reference.greedy(random_prompt(25, seed=int(name.split()[1]) % 3), COUNT), name
    driver.assert_nothing_leaked()


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("instance", INSTANCES)
def test_a_request_that_fails_in_the_sampler_fails_alone(
    tiny: Path, reference: Reference, instance: str, steps: int
) -> None:
    driver = Driver(tiny, **SETTINGS)
    submit_six(driver)
    for _ in range(steps):
        driver.step()
    bias = ((NO_SUCH_TOKEN, 1.0),)
    bad = driver.submit("bad", random_prompt(5), COUNT, kv_cache=instance, logit_bias=bias)
    driver.run()
    assert bad.failed is not None
    assert (bad.failed.status, bad.failed.code) == (500, "step_failed")
    assert "IndexError" in bad.failed.message
    assert_others_are_right(driver, reference)


@pytest.mark.parametrize("instance", INSTANCES)
def test_a_request_whose_tokens_break_the_model_fails_alone(tiny: Path, reference: Reference, instance: str) -> None:
    driver = Driver(tiny, **SETTINGS)
    poison = unused_token(driver)
    make_fail(driver, lambda ids: poison in ids)
    submit_six(driver, ignore_eos=True)
    bad = driver.submit("bad", [*random_prompt(20, seed=1), poison], COUNT, kv_cache=instance)
    driver.run()
    assert bad.failed is not None
    assert [r.outcome for r in driver.records].count("error") == 1
    assert_others_are_right(driver, reference)


def unused_token(driver: Driver) -> int:
    """Return a token that no good prompt has, and no warm-up step (which computes zeros)."""
    used = {token for i in range(3) for token in random_prompt(25, seed=i)} | {0}
    return next(i for i in range(driver.core.model.info.vocab_size) if i not in used)


def test_requests_that_wait_for_a_failing_ones_prefill_compute_it_themselves(tiny: Path, reference: Reference) -> None:
    """The failing request computes the shared blocks for which the others wait."""
    driver = Driver(tiny, **SETTINGS | {"max_num_batched_tokens": 16})
    poison = unused_token(driver)
    make_fail(driver, lambda ids: poison in ids)
    shared = random_prompt(25, seed=0)
    bad = driver.submit("bad", [*shared, poison], COUNT, kv_cache="paged")
    for i in range(4):
        driver.submit(f"paged {3 * i}", shared, COUNT, kv_cache="paged")
    driver.run()
    assert bad.failed is not None
    assert_others_are_right(driver, reference)


def test_siblings_of_a_failing_request_end_with_errors_too(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **SETTINGS)
    submit_six(driver)
    bias = {"logit_bias": ((NO_SUCH_TOKEN, 1.0),), "kv_cache": "paged"}
    bad = driver.submit("bad", random_prompt(9), COUNT, **bias)
    children = [driver.submit(f"bad {i}", random_prompt(9), COUNT, sibling_of="bad", **bias) for i in range(2)]
    driver.run()
    for heard in [bad, *children]:
        assert heard.failed is not None
        assert heard.failed.code == "step_failed"
    driver.assert_nothing_leaked()


def test_rows_that_fail_together_and_not_alone_all_go_on(tiny: Path, reference: Reference) -> None:
    """For example, because memory is short for the whole step."""
    driver = Driver(tiny, **SETTINGS)
    longest = 26
    make_fail(driver, lambda ids: len(ids) > longest)
    submit_six(driver)
    driver.run()
    assert_others_are_right(driver, reference)


@settings(max_examples=2, phases=(Phase.reuse, Phase.generate))  # a smaller seed is nothing simpler
@given(seed=st.integers(0, 2**32 - 1))
def test_drafts_and_scores_survive_a_failure_beside_them(tiny: Path, seed: int) -> None:
    """Random requests get the same events with and without failing requests between them."""
    sent = []
    for broken in (False, True):
        draw = random.Random(seed)
        driver = Driver(tiny, **DETERMINISTIC)
        for i in range(10):
            options: dict[str, Any] = {
                "kv_cache": draw.choice([name for name in INSTANCES if name != "mirrored"]),
                "logprobs": draw.choice([None, 0, 3]),
                "prompt_logprobs": draw.choice([None, 2]),
                "temperature": draw.choice([0.0, 1.0]),
                "seed": i,
                "speculation": draw.choice([None, Speculation(4)]),
            }
            count = draw.randrange(1, 12)
            driver.submit(f"good {i}", random_prompt(draw.randrange(1, 40), seed=draw.randrange(4)), count, **options)
            if draw.random() < 0.5 and broken:
                bias = ((NO_SUCH_TOKEN, 1.0),)
                driver.submit(f"bad {i}", random_prompt(7, seed=i), 3, kv_cache=options["kv_cache"], logit_bias=bias)
            if draw.random() < 0.3:
                driver.step()
        driver.run()
        assert all((heard.failed is not None) == name.startswith("bad") for name, heard in driver.heard.items())
        sent.append(
            {
                name: (heard.tokens, heard.scores, heard.prompt_scores, heard.finish_reason)
                for name, heard in driver.heard.items()
                if heard.failed is None
            }
        )
        driver.assert_nothing_leaked()
    assert sent[0] == sent[1]


def test_a_failing_strategy_and_a_failing_request_in_one_step(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **SETTINGS)
    submit_six(driver)
    for _ in range(3):
        driver.step()
    break_locate(driver, "paged", ALWAYS)
    bad = driver.submit("bad", random_prompt(5), COUNT, kv_cache="contiguous", logit_bias=((NO_SUCH_TOKEN, 1.0),))
    driver.run()
    assert bad.failed is not None
    for name, heard in driver.heard.items():
        if name.startswith("paged"):
            assert heard.failed is not None
            assert heard.failed.code == "strategy_failed"
        elif name != "bad":
            assert heard.tokens == reference.greedy(random_prompt(25, seed=int(name.split()[1]) % 3), COUNT)
    driver.assert_nothing_leaked()


def test_a_model_that_computes_nothing_any_more_ends_the_engine(tiny: Path) -> None:
    """The supervisor then starts a new engine."""
    driver = Driver(tiny, **SETTINGS)
    submit_six(driver)
    driver.step()
    make_fail(driver, lambda ids: True)
    with pytest.raises(IndexError, match="broken on purpose"):
        driver.run()


def test_a_request_that_cannot_be_queued_is_refused_alone(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **SETTINGS)
    submit_six(driver)
    driver.step()
    bad = driver.submit("bad", random_prompt(5), COUNT, speculation="no speculation")
    assert bad.failed is not None
    assert bad.failed.code == "request_failed"
    driver.run()
    assert_others_are_right(driver, reference)
