"""Requests with a grammar, among others: each text is what it would be alone, whatever happens to the request.

Expected texts are those of an engine that computes one request at a time, without drafts.
"""

from __future__ import annotations

import random
import re
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from cache_strategies import registry
from server.engine.grammar import state
from server.engine.ipc.messages import Speculation
from server.grammar.constraint import Constraint, constrain_to_choices
from server.grammar.lark import write_lark
from server.text.vocabulary import Vocabulary
from tests.engine.devices import DEVICES
from tests.engine.engine_driver import Driver, RequestEvents
from tests.engine.expected_tokens import random_prompt
from tests.engine.fake_proposer import FakeProposer
from tests.engine.grammar.conftest import EOS
from tests.engine.grammar.constrained import CASES, SETTINGS, Case, compile_grammar, compute_alone, read, submit
from tests.engine.test_step_recovery import LAST_LAYER, break_attend


@pytest.fixture(scope="module")
def alone(model: Path) -> Driver:
    """Return the engine that computes expected texts."""
    return Driver(model, **SETTINGS)


@pytest.mark.parametrize("name", CASES)
def test_every_text_satisfies_its_grammar(alone: Driver, vocabulary: Vocabulary, rng: random.Random, name: str) -> None:
    texts = set()
    for _ in range(25):
        heard = compute_alone(alone, CASES[name], rng.randrange(2**20), temperature=rng.choice([0.0, 1.0, 2.0]))
        texts.add(text := read(vocabulary, heard))
        assert heard.finish_reason == "stop", text
        assert CASES[name].accepts(text), text
    assert len(texts) > 1


def test_every_kind_of_strategy(model: Path, vocabulary: Vocabulary, rng: random.Random) -> None:
    """Under each, with and without drafts, all texts satisfy their grammars."""
    kinds = {name: {"kind": name} for name in registry.BUILTIN}
    driver = Driver(model, **(SETTINGS | {"strategies": kinds, "kv_memory": "48MiB", "deterministic": False}))
    heard = {
        (kind, name, drafts): submit(
            driver,
            f"{kind} {name} {drafts}",
            case,
            rng.randrange(2**20),
            kv_cache=kind,
            speculation=Speculation(drafts),
        )
        for kind in kinds
        for name, case in CASES.items()
        for drafts in (0, 4)
    }
    driver.run()
    for (kind, name, _), events in heard.items():
        assert events.failed is None, (kind, name, events.failed)
        assert events.finish_reason == "stop", (kind, name)
        assert CASES[name].accepts(read(vocabulary, events)), (kind, name)
    driver.assert_nothing_leaked()


@pytest.mark.parametrize("device", DEVICES)
def test_every_device(model: Path, vocabulary: Vocabulary, rng: random.Random, device: str) -> None:
    driver = Driver(model, **(SETTINGS | {"device": device, "deterministic": False}))
    heard = {name: submit(driver, name, case, rng.randrange(2**20)) for name, case in CASES.items()}
    driver.run()
    for name, events in heard.items():
        assert events.failed is None, (name, events.failed)
        assert CASES[name].accepts(read(vocabulary, events)), name


def test_a_text_ends_with_the_token_that_completes_it(alone: Driver, vocabulary: Vocabulary) -> None:
    """No further step is computed to draw an end token."""
    case = Case(constrain_to_choices(["ab"], ""), lambda text: text == "ab")
    for options in ({}, {"ignore_eos": True}, {"min_tokens": 9}, {"max_tokens": 2}):
        before = len(alone.steps)
        heard = compute_alone(alone, case, 3, **options)
        assert (read(vocabulary, heard), heard.finish_reason, len(heard.tokens)) == ("ab", "stop", 2)
        assert len(alone.steps) - before == 2


def test_choices_with_the_text_of_special_tokens_are_spelled_in_others(
    alone: Driver, vocabulary: Vocabulary, rng: random.Random
) -> None:
    special = [vocabulary.token_bytes(token).decode() for token in sorted(vocabulary.special_ids)]
    choices = [text for name in special for text in (name, f"a{name}b")]
    case = Case(constrain_to_choices(choices, ""), choices.__contains__)
    found = set()
    for _ in range(20):
        heard = compute_alone(alone, case, rng.randrange(2**20), temperature=2.0)
        found.add(read(vocabulary, heard))
        assert heard.finish_reason == "stop"
        assert not set(heard.tokens) & vocabulary.special_ids
    assert found <= set(choices)
    assert len(found) > 1


def test_the_end_token_comes_only_where_the_grammar_may_end(
    alone: Driver, vocabulary: Vocabulary, rng: random.Random
) -> None:
    pattern = "(ab)+"
    case = Case(Constraint("regex", pattern, ""), lambda text: re.fullmatch(pattern, text) is not None, 40)
    eager = {"logit_bias": ((EOS, 5.0),)}  # the end is likely wherever it is allowed
    lengths = set()
    for _ in range(30):
        heard = compute_alone(alone, case, rng.randrange(2**20), **eager)
        text = read(vocabulary, heard)
        assert case.accepts(text) if heard.finish_reason == "stop" else len(heard.tokens) == 40
        lengths.add(len(text))
    assert 2 in lengths
    longer = compute_alone(alone, case, 4, **eager, min_tokens=9)
    assert len(longer.tokens) >= 10
    assert case.accepts(read(vocabulary, longer))
    assert compute_alone(alone, case, 4, **eager, ignore_eos=True).finish_reason == "length"
    (b,) = [token for token in range(2, 300) if vocabulary.token_bytes(token) == b"c"]
    by_stop_token = compute_alone(alone, case, 4, stop_token_ids=(b,), logit_bias=((b, 9.0), (EOS, -100.0)))
    assert by_stop_token.tokens[-1] == b
    assert case.accepts(b"".join(map(vocabulary.token_bytes, by_stop_token.tokens[:-1])).decode())


def test_log_probabilities_are_those_of_the_model(alone: Driver) -> None:
    """As vLLM documents its `raw_logprobs`: before whatever changes logits, so also before the grammar."""
    case = CASES["regex"]
    heard = compute_alone(alone, case, 5, logprobs=3, temperature=0.0)
    assert [score.token for score in heard.scores] == heard.tokens
    assert any(score.rank > 1 for score in heard.scores)  # a likelier token was not allowed
    free = compute_alone(alone, None, 5, logprobs=3, temperature=0.0)
    assert heard.scores[0].top_logprobs == free.scores[0].top_logprobs


def test_a_request_whose_parameters_leave_no_token_ends_alone(alone: Driver) -> None:
    other = submit(alone, "other", None, 7)
    words = array("q", [260, 261]).tobytes()
    heard = submit(alone, "impossible", CASES["choice"], 8, allowed_token_ids=words)
    alone.run()
    assert heard.failed is not None
    assert (heard.failed.status, heard.failed.code) == (400, "grammar_failed")
    assert other.tokens == compute_alone(alone, None, 7).tokens
    alone.assert_nothing_leaked()
    assert not any(step.report.failures for step in alone.steps)


def test_a_grammar_that_exceeds_its_limits_ends_its_request_alone(model: Path, alone: Driver) -> None:
    """The states of this one are sets of pairs of counts, of which there are more with each token."""
    pairs = Case(Constraint("regex", "(a{1,1000}){1,1000}", ""), lambda _: True, 100)
    driver = Driver(model, **SETTINGS)
    others = [submit(driver, f"other {seed}", CASES["schema"], seed) for seed in range(2)]
    heard = submit(driver, "pairs", pairs, 9, ignore_eos=True)
    driver.run()
    assert heard.failed is not None
    assert (heard.failed.status, heard.failed.code) == (400, "grammar_failed")
    assert "too many" in heard.failed.message
    assert 1 < len(heard.tokens) < 100
    for seed, other in enumerate(others):
        assert other.tokens == compute_alone(alone, CASES["schema"], seed).tokens
    driver.assert_nothing_leaked()


def test_a_grammar_that_is_slow_in_every_step_ends_its_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is that of the thread, and stands for work within llguidance's limits."""
    clock = [0.0]

    def read_clock() -> float:
        clock[0] += 0.1
        return clock[0]

    monkeypatch.setattr(state.time, "thread_time", read_clock)
    driver = Driver(model, **SETTINGS)
    heard = submit(driver, "slow", CASES["schema"], 1)
    driver.run()
    assert heard.failed is not None
    assert heard.failed.code == "grammar_failed"
    assert "too much time" in heard.failed.message
    count = len(heard.tokens)
    assert count < 6
    for max_tokens in range(1, count + 1):  # a text that ends in the step in which it is too slow has no error
        ended = submit(driver, f"{max_tokens}", CASES["schema"], 1, max_tokens=max_tokens)
        driver.run()
        assert (ended.finish_reason, ended.failed) == ("length", None)


def test_a_grammar_that_the_server_fails_to_compile(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is not at fault, and the next one with the grammar is served."""
    driver = Driver(model, **SETTINGS)
    with monkeypatch.context() as patch:
        patch.setattr(driver.engine.grammars, "_load_vocabulary", lambda: 1 // 0)
        heard = submit(driver, "first", CASES["choice"], 1)
        assert heard.failed is not None
        assert (heard.failed.status, heard.failed.code) == (500, "request_failed")
    assert compute_alone(driver, CASES["choice"], 1).finish_reason == "stop"


def test_choices_of_a_prompt_share_it_although_the_grammar_is_ready_for_the_second_one(model: Path) -> None:
    driver = Driver(model, **SETTINGS)
    prompt, lark = random_prompt(20, seed=1), write_lark("regex", "[a-z]{3}")
    first = driver.submit("first", prompt, grammar=lark)
    while not driver.engine.grammars.prepare(lark):
        time.sleep(0.001)
    second = driver.submit("second", prompt, grammar=lark, sibling_of="first", seed=1, temperature=1.0)
    driver.run()
    assert first.admitted is not None
    assert second.admitted is not None
    assert (first.admitted.cached_tokens, second.admitted.cached_tokens) == (0, len(prompt))


# ---------------------------------------------------------------- random histories
class History:
    """Runs requests with and without grammars, drafts and several choices, while others interfere."""

    def __init__(self, model: Path, alone: Driver, rng: random.Random) -> None:
        self.driver = Driver(model, **(SETTINGS | {"kv_overcommit": 9}))
        self._alone, self._rng = alone, rng
        self.expected: dict[str, RequestEvents] = {}
        self.cases: dict[str, Case | None] = {}
        self.drafted = self.accepted = 0
        self._unbroken, self._last_break = ["paged", "contiguous"], 0

    def arrive(self) -> None:
        rng, index = self._rng, len(self.driver.heard)
        case = rng.choice([None, *CASES.values()])
        seed, choices = rng.randrange(2**20), rng.choice([1, 1, 3])
        options = {"kv_cache": rng.choice(["paged", "contiguous"]), "temperature": rng.choice([0.0, 1.5])}
        drafts = rng.random() < 0.5
        for choice in range(choices):
            name = f"{index}-{choice}"
            expected = compute_alone(self._alone, case, seed, **(options | {"seed": seed + choice}))
            sibling = {"sibling_of": f"{index}-0"} if choice else {}
            submit(self.driver, name, case, seed, **(options | {"seed": seed + choice}), **sibling)
            self.expected[name], self.cases[name] = expected, case
            if drafts:
                request = self.driver.request(name)
                whole = [*request.tokens, *expected.tokens]
                request.proposer = FakeProposer(whole, count=4, right=0.8, seed=seed)

    def interfere(self) -> None:
        running = self.driver.core.scheduler.running
        match self._rng.randrange(4):
            case 0 if running:
                self.driver.preempt(self._rng.choice(running).key[1])
            case 1 if self._unbroken and len(self.driver.steps) > self._last_break + 3:  # else a quarantine follows
                # Each once: a second fault that waits for the same step would fail its repetition, too
                instance = self._unbroken.pop(self._rng.randrange(len(self._unbroken)))
                self._last_break = len(self.driver.steps)
                break_attend(LAST_LAYER)(self.driver, instance, 1)
            case 2 if running and self._rng.random() < 0.2:
                name = self._rng.choice(running).key[1]
                self.driver.cancel(name)
                del self.expected[name]

    def step(self) -> None:
        result = self.driver.step()
        for records in result.report.drafts.values():
            self.drafted += sum(record.num_tokens for record in records)
            self.accepted += sum(record.num_accepted for record in records)


def test_random_histories(model: Path, alone: Driver, vocabulary: Vocabulary, rng: random.Random) -> None:
    totals = [0, 0, 0]
    for _ in range(2):
        history = History(model, alone, rng)
        for _ in range(60):
            if len(history.driver.core.scheduler.waiting) < 4 and rng.random() < 0.3:
                history.arrive()
            if rng.random() < 0.3:
                history.interfere()
            if history.driver.core.busy:
                history.step()
        while history.driver.core.busy:
            history.step()
        for name, expected in history.expected.items():
            heard, case = history.driver.heard[name], history.cases[name]
            assert heard.failed is None, heard.failed
            assert heard.tokens == expected.tokens, name
            assert heard.finish_reason == expected.finish_reason
            if case is not None:
                assert case.accepts(read(vocabulary, heard))
        history.driver.assert_nothing_leaked()
        totals[0] += history.drafted
        totals[1] += history.accepted
        totals[2] += sum(heard.preempted for heard in history.driver.heard.values())
    assert 0 < totals[1] < totals[0], "drafts were accepted, and cut"


def test_a_step_that_fails_after_sampling_leaves_no_trace(
    model: Path, alone: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is repeated as a whole, then row by row; masks are computed again each time."""
    driver = Driver(model, **SETTINGS)
    heard = [submit(driver, f"{seed}", CASES["schema"], seed) for seed in range(4)]
    sampler = driver.core.runner._sampler
    sample, calls = sampler.sample, [0]

    def fail_sometimes(*args: Any) -> Any:
        output = sample(*args)
        calls[0] += 1
        if calls[0] % 7 in (1, 3):
            raise RuntimeError("after the masks were computed")
        return output

    monkeypatch.setattr(sampler, "sample", fail_sometimes)
    driver.run()
    alive = [seed for seed, each in enumerate(heard) if each.failed is None]
    assert alive
    for seed in alive:
        assert heard[seed].tokens == compute_alone(alone, CASES["schema"], seed).tokens


# ---------------------------------------------------------------- waiting for the compiler
def test_a_request_waits_for_its_grammar_and_others_do_not(model: Path) -> None:
    driver = Driver(model, **SETTINGS)
    case = CASES["schema"]
    grammar = write_lark(case.constraint.kind, case.constraint.text)
    driver.submit("constrained", random_prompt(9, seed=1), 90, grammar=grammar, ignore_eos=False)
    assert driver.core.busy
    assert not driver.core.scheduler.waiting
    other = driver.submit("other", random_prompt(9, seed=2), 4)
    for _ in range(4):
        driver.step()
    assert other.finish_reason == "length"
    deadline = time.monotonic() + 60
    while driver.core.busy and time.monotonic() < deadline:
        driver.core.step()
    assert not driver.core.busy


def test_a_request_that_waits_for_its_grammar_can_be_cancelled(model: Path) -> None:
    driver = Driver(model, **SETTINGS)
    for name in ("one", "two"):
        driver.submit(name, random_prompt(9, seed=1), 9, grammar=f'start: "{name}"')
    assert driver.core.cancel(0, "one")
    assert not driver.core.cancel(0, "one")
    assert driver.core.busy
    driver.core.cancel_worker(0)
    assert not driver.core.busy


def test_a_grammar_that_does_not_compile_is_refused(alone: Driver) -> None:
    while not alone.engine.grammars.prepare("start: nowhere"):
        time.sleep(0.001)
    heard = alone.submit("refused", random_prompt(9, seed=1), 9, grammar="start: nowhere")
    assert heard.failed is not None
    assert (heard.failed.status, heard.failed.code) == (400, "invalid_grammar")


def test_lookups_compilations_and_failures_are_reported(model: Path, rng: random.Random) -> None:
    """By a count of the requests, in any order; a grammar is compiled once however many requests wait for it."""
    driver = Driver(model, **SETTINGS)
    drawn = [rng.choice([*CASES, None]) for _ in range(12)]
    for number, name in enumerate(drawn):
        case = CASES[name] if name is not None else None
        lark = None if case is None else write_lark(case.constraint.kind, case.constraint.text)
        driver.submit(f"{number}", random_prompt(5, seed=number), 4, grammar=lark)  # waits until it is compiled
    for case in (CASES[name] for name in drawn if name is not None):
        compile_grammar(driver, case)
    driver.run()
    submit(driver, "impossible", CASES["choice"], 8, allowed_token_ids=array("q", [260, 261]).tobytes())
    driver.run()
    constrained = [name for name in drawn if name is not None] + ["choice"]
    events = [each for result in driver.steps if (each := result.report.grammars) is not None]
    assert sum(len(each.compile_seconds) for each in events) == len(set(constrained))
    assert all(seconds > 0 for each in events for seconds in each.compile_seconds)
    assert sum(each.lookups for each in events) == len(constrained)
    assert sum(each.hits for each in events) == len(constrained) - len(set(constrained))
    assert sum(each.failures for each in events) == 1


def test_steps_without_grammars_report_none(model: Path) -> None:
    driver = Driver(model, **SETTINGS)
    heard = driver.submit("free", random_prompt(5, seed=1), 4)
    driver.run()
    assert len(heard.tokens) == 4
    assert all(result.report.grammars is None for result in driver.steps)
    submit(driver, "constrained", CASES["regex"], 3)
    before = len(driver.steps)
    driver.run()
    busy = [result.report for result in driver.steps[before:] if result.report.rows]
    assert all(report.grammars is not None and report.grammars.step_seconds > 0 for report in busy)
