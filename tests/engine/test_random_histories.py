"""Random histories in tiny memory: bookkeeping stays consistent, and every answer is right.

Prompts arrive, for several tenants, with several choices and with drafts; they are cancelled; strategies fail; an
operator clears, pins and changes shares of memory. Texts have common prefixes, instances have blocks of several sizes,
priorities cross. A history ends when all requests have ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.engine.admin import run_command
from server.engine.ipc.messages import Clear, Inspect, PinPrefix, SamplingParams, Share, Unpin
from server.engine.scheduling.request import RequestError
from server.models.transformers_backend.model import TransformersModel
from tests.engine.engine_driver import Driver, RequestEvents, least_memory, strategies
from tests.engine.expected_tokens import Reference, random_prompt
from tests.engine.fake_proposer import FakeProposer
from tests.engine.stateful_model import StatefulModel, loaded_with_states
from tests.engine.test_step_recovery import break_attend
from tests.models.random_models import load_decoder, save_random_model

WINDOW, SINKS = 10, 2
COMMON = random_prompt(26, seed=5)
PROMPTS = [
    *(COMMON[:n] for n in (1, 4, 8, 9, 24, 26)),
    *(COMMON[:n] + random_prompt(tail, seed=6) for n, tail in ((8, 3), (16, 1), (16, 9), (24, 5), (25, 8))),
    *(random_prompt(n, seed=6) for n in (2, 13, 30)),
]
EXAMPLES, MANY = 28, 300  # histories
MOST = 9  # tokens a request may ask for
SETTINGS: dict[str, Any] = {
    "strategies": strategies(
        paged={"kind": "paged", "block_size": 4},
        pairs={"kind": "paged", "block_size": 8, "floor": "10%"},
        private={"kind": "paged", "block_size": 5, "prefix_cache": False, "limit": "95%"},
        sliding_window={"kind": "sliding_window", "window": WINDOW, "sinks": SINKS, "max_row": 4},
    ),
    "max_seq_len": 44,
    "max_num_seqs": 5,
    "max_queued_requests": 9,
    "kv_overcommit": 9,
}
INSTANCES = ("paged", "pairs", "private", "contiguous", "sliding_window")


class Arrival(NamedTuple):
    prompt: int
    instance: str
    max_tokens: int
    priority: int
    drawn: bool
    choices: int
    caching: dict[str, Any]
    num_draft_tokens: int  # of a draft; some are wrong


class Cancellation(NamedTuple):
    newest: int  # the how-manieth arrival, counted from the last
    choice: int


class Steps(NamedTuple):
    many: int


class Break(NamedTuple):
    instance: str
    times: int  # one failure is repeated and not noticed, two in a step end its rows


class Order(NamedTuple):
    """An operator's command, which may be rejected and then must have changed nothing."""

    command: Clear | PinPrefix | Share


class Unpinning(NamedTuple):
    """Remove all pins of an instance."""

    instance: str


Action = Arrival | Cancellation | Steps | Break | Order | Unpinning

TENANTS = ("", "", "you")
CACHE_SALTS = ("", "", "mine")
CACHING = st.fixed_dictionaries(
    {"tenant": st.sampled_from(TENANTS), "cache_salt": st.sampled_from(CACHE_SALTS)},
    optional={
        "max_cached": st.integers(0, 30),
        "kept": st.integers(-1, 1),
        "ttl": st.floats(0.001, 1),
    },
)
ARRIVALS = st.builds(
    Arrival,
    st.integers(0, len(PROMPTS) - 1),
    st.sampled_from(INSTANCES),
    st.integers(1, MOST),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([1, 1, 1, 2, 4]),
    CACHING,
    st.sampled_from([0, 0, 1, 4]),
)
SHARES = st.sampled_from([None, "0%", "5%", "30%", "60%", "100%"])
ORDERS = (
    st.builds(
        Clear, st.sampled_from(INSTANCES), st.sampled_from([None, *TENANTS]), st.sampled_from([None, *CACHE_SALTS])
    )
    | st.builds(
        PinPrefix, st.sampled_from(INSTANCES[:2]), st.just(COMMON), st.floats(0.001, 9), st.sampled_from(TENANTS)
    )
    | st.builds(Share, st.sampled_from(INSTANCES), SHARES, SHARES)
)
OTHERS = (
    st.builds(Cancellation, st.integers(0, 5), st.integers(0, 3))
    | st.builds(Break, st.sampled_from(INSTANCES), st.integers(1, 2))
    | st.builds(Order, ORDERS)
    | st.builds(Unpinning, st.sampled_from(INSTANCES))
)
HISTORIES: st.SearchStrategy[list[Action]] = st.lists(
    st.one_of(*[ARRIVALS] * 8, *[st.builds(Steps, st.integers(1, 6))] * 5, OTHERS), min_size=30, max_size=60
)


class History:
    """Runs actions and checks their results."""

    def __init__(self, driver: Driver, reference: Reference) -> None:
        self._driver, self._reference = driver, reference
        self._arrivals: list[Arrival] = []
        self._cancelled: set[str] = set()
        self._broken: Counter[str] = Counter()

    def play(self, action: Action) -> None:
        match action:
            case Arrival():
                self._arrive(action)
            case Cancellation(newest, choice):
                if newest < len(self._arrivals) and choice < self._arrivals[-1 - newest].choices:
                    name = f"{len(self._arrivals) - 1 - newest}.{choice}"
                    self._cancelled.add(name)
                    self._driver.cancel(name)
            case Steps(many):
                for _ in range(many):
                    self._driver.step()
            case Break(instance, times):
                self._broken[instance] += times
                last_layer = len(self._driver.core.model.layer_specs) - 1
                break_attend(last_layer)(self._driver, instance, times)
            case Order(command):
                with suppress(RequestError):
                    run_command(self._driver.engine, command)
            case Unpinning(instance):
                unpin(self._driver, instance)
        self._driver.check()

    def end(self) -> None:
        """Check that each request was answered in full, rejected for a full queue, failed, or was cancelled."""
        self._driver.run(at_most=60 * (len(self._driver.heard) + 1))
        for i, arrival in enumerate(self._arrivals):
            for choice in range(arrival.choices):
                name = f"{i}.{choice}"
                self._assert_right(self._driver.heard[name], arrival, choice, cancelled=name in self._cancelled)

    def _assert_right(self, heard: RequestEvents, arrival: Arrival, choice: int, *, cancelled: bool) -> None:
        expected = self._expected(arrival, choice)
        if heard.failed is not None and heard.failed.status == 500:
            assert self._broken[arrival.instance] > 1, heard.failed
        elif heard.failed is not None:
            assert heard.failed.status == 429 or heard.failed.code == "strategy_quarantined"
            assert heard.failed.status == 429 or self._broken[arrival.instance] > 1
        if heard.failed is not None or cancelled:
            assert heard.tokens == expected[: len(heard.tokens)], arrival
        else:
            assert (heard.tokens, heard.finish_reason) == (expected, "length"), arrival

    def _arrive(self, arrival: Arrival) -> None:
        prompt, instance, max_tokens, priority, _, choices, caching, num_draft_tokens = arrival
        head = f"{len(self._arrivals)}.0"
        self._arrivals.append(arrival)
        for choice in range(choices):
            sampling = _sampling(arrival, choice)
            name = f"{len(self._arrivals) - 1}.{choice}"
            heard = self._driver.submit(
                name,
                PROMPTS[prompt],
                max_tokens,
                kv_cache=instance,
                priority=priority,
                sibling_of=head if choice else None,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                seed=sampling.seed,
                **caching,
            )
            if num_draft_tokens and heard.failed is None:
                whole = PROMPTS[prompt] + self._expected(arrival, choice)
                proposer = FakeProposer(whole, count=num_draft_tokens, seed=len(self._arrivals))
                self._driver.request(name).proposer = proposer  # type: ignore[assignment]

    def _expected(self, arrival: Arrival, choice: int) -> list[int]:
        prompt, instance, max_tokens = arrival[:3]
        if instance == "sliding_window":
            return self._reference.windowed(PROMPTS[prompt], MOST, window=WINDOW, sinks=SINKS)[:max_tokens]
        if arrival.drawn:
            return self._reference.sampled(PROMPTS[prompt], _sampling(arrival, choice))
        return self._reference.greedy(PROMPTS[prompt], MOST)[:max_tokens]


def _sampling(arrival: Arrival, choice: int) -> SamplingParams:
    drawn = arrival.drawn and arrival.instance != "sliding_window"
    seed = arrival.prompt + 100 * choice
    return SamplingParams(
        arrival.max_tokens, 0.9 if drawn else 0.0, top_k=10 if drawn else 0, seed=seed, ignore_eos=True
    )


def unpin(driver: Driver, instance: str) -> None:
    for pin in run_command(driver.engine, Inspect(instance)).get("pins", []):
        with suppress(RequestError):  # it may have expired
            run_command(driver.engine, Unpin(instance, pin["id"]))


def restore(driver: Driver, shares: dict[str, tuple[int, int]]) -> None:
    """Restore the state before a history, except for cached blocks."""
    for name in driver.core.isolation.quarantined:
        driver.core.isolation.end_quarantine(name)
    driver.core.isolation.record_steps(driver.core.instances)  # faults of this history do not count in the next one
    for name in driver.core.instances:
        for broken in ("locate", "attend"):
            vars(driver.core.instances[name].strategy).pop(broken, None)  # whole again
        unpin(driver, name)
        driver.core.shares.set_share(name, floor=0, limit=driver.core.memory.total_bytes)
    for name, (floor, limit) in shares.items():
        driver.core.shares.set_share(name, floor=floor, limit=limit)
    assert not any(cache.draining for cache in driver.core.instances.values())


TINY, TOY_STATES = "tiny", "tiny with the toy's states"  # and the names of random models with states


class Sizes(NamedTuple):
    max_num_batched_tokens: int
    memory: float  # longest sequences for which there is memory
    model: str = TINY


_idle: dict[Sizes, Driver] = {}


class Models:
    """The models that histories run with, and the texts that are expected of them."""

    def __init__(self, tiny: Path, directory: Path) -> None:
        self._tiny, self._directory = tiny, directory
        self._references: dict[str, Reference] = {}

    def find(self, name: str) -> Path:
        """Return the directory of a model."""
        if name in (TINY, TOY_STATES):
            return self._tiny
        if not (self._directory / name).exists():
            save_random_model(name, self._directory / name)
        return self._directory / name

    def expect(self, name: str) -> Reference:
        """Return the expected texts of a model."""
        if name not in self._references:
            model: Any
            if name in (TINY, TOY_STATES):
                model = load_decoder(self._tiny)
            else:
                model = TransformersModel(self.find(name), torch.float32, torch.device("cpu"))
            self._references[name] = Reference(StatefulModel(model) if name == TOY_STATES else model)  # type: ignore[arg-type]
        return self._references[name]


@pytest.fixture(scope="session")
def models(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tiny, tmp_path_factory.mktemp("models"))


@contextmanager
def a_driver(models: Models, sizes: Sizes) -> Iterator[Driver]:
    """Return a driver with memory for a number of longest sequences; reused if the last history left it clean."""
    sized = SETTINGS | {"max_num_batched_tokens": sizes.max_num_batched_tokens}
    driver = _idle.pop(sizes, None)
    if driver is None:
        directory = models.find(sizes.model)
        with loaded_with_states() if sizes.model == TOY_STATES else nullcontext():
            driver = Driver(directory, **sized, kv_memory=str(int(least_memory(directory, **sized) * sizes.memory)))
    shares = {name: driver.core.memory.get_share(name) for name in driver.core.instances}
    yield driver
    restore(driver, shares)
    driver.assert_nothing_leaked()
    driver.heard.clear()
    driver.steps.clear()
    _idle[sizes] = driver


def play(models: Models, sizes: Sizes, examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(HISTORIES)
    def check(actions: list[Action]) -> None:
        with a_driver(models, sizes) as driver:
            history = History(driver, models.expect(sizes.model))
            for action in actions:
                history.play(action)
            history.end()

    check()


ALL_SIZES = [Sizes(3, 1.25), Sizes(16, 1.25), Sizes(16, 3), Sizes(3, 1.25, TOY_STATES), Sizes(16, 3, TOY_STATES)]
HYBRID_SIZES = [Sizes(3, 1.25, "falcon_h1"), Sizes(16, 1.25, "qwen3_5"), Sizes(16, 3, "nemotron_h")]
FEWER = 8  # histories of a model that transformers computes, slowly


@pytest.mark.fuzz
@pytest.mark.parametrize("sizes", ALL_SIZES, ids=str)
def test_whatever_happens_everybody_is_answered_rightly(models: Models, sizes: Sizes) -> None:
    play(models, sizes, EXAMPLES)


@pytest.mark.fuzz
@pytest.mark.parametrize("sizes", HYBRID_SIZES, ids=str)
def test_whatever_happens_to_a_model_with_states(models: Models, sizes: Sizes) -> None:
    play(models, sizes, FEWER)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [*ALL_SIZES, *HYBRID_SIZES], ids=str)
def test_whatever_happens_and_however_often(models: Models, sizes: Sizes) -> None:
    play(models, sizes, MANY if sizes in ALL_SIZES else EXAMPLES)
